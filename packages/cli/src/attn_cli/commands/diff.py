"""`attn explain --diff A B`: what is decided otherwise on another device, and why."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from attn_cli.environment import settings_record
from attn_cli.output import OutputFlags, emit
from attn_cli.policies import resolver
from attn_cli.schema import SCHEMA_VERSION

if TYPE_CHECKING:
    from rich.console import RenderableType

    from attn_cli.request_flags import RequestFlags
    from attn_shared.request import AttentionRequest
    from attn_shared.selection import Selection
    from attn_shared.settings import Settings

__all__ = ["explain_diff"]


def explain_diff(
    flags: RequestFlags, devices: tuple[str, str], settings: Settings, output: OutputFlags
) -> int:
    """Print a request's, or a model's, answers on two devices beside each other.

    Raises:
        AttnError: a device or a name that nobody knows, or a request that nobody may accept.
    """
    asked = _asked(flags)
    answers = [_answers(flags, device, settings, asked) for device in devices]
    pairs = list(zip(asked, *answers, strict=True))
    record: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "settings": settings_record(settings),
        "devices": [_place(found) for found in devices],
        "groups": [_group(name, first, second) for (name, _), first, second in pairs],
    }
    chosen = [f"{row['name']}: {' | '.join(map(str, row['chosen']))}" for row in record["groups"]]
    emit(record, output, tables=lambda: _tables(record), bare=chosen)
    return 0


def _place(device: str) -> dict[str, Any]:
    from attn_cli.devices import named_device
    from attn_shared.selector import DEFAULT_SELECTOR

    return {"asked": device, **named_device(device, DEFAULT_SELECTOR).to_dict()}


def _asked(flags: RequestFlags) -> list[tuple[str, AttentionRequest]]:
    """Return the requests with what each is called: one, or one for each group of a model."""
    from attn_cli.model_flags import model_of

    if flags.model is None:
        return [("request", flags.to_request())]
    groups = model_of(flags, flags.model).attention_groups
    return [(group.name, group.request) for group in groups if group.request is not None]


def _answers(
    flags: RequestFlags,
    device: str,
    settings: Settings,
    asked: list[tuple[str, AttentionRequest]],
) -> list[Selection]:
    from attn_cli.devices import named_device
    from attn_shared.selector import DEFAULT_SELECTOR

    resolve = resolver(flags, settings, named_device(device, DEFAULT_SELECTOR))
    return [_answer(resolve, request) for _, request in asked]


def _answer(resolve: Any, request: AttentionRequest) -> Selection:
    """Return the selection; where nothing serves, the one that holds the verdicts."""
    from attn_shared.errors import NoBackendError, VendorMissingError

    try:
        found: Selection = resolve(request)
    except (NoBackendError, VendorMissingError) as error:
        if error.selection is None:
            raise
        return error.selection
    return found


def _group(name: str, first: Selection, second: Selection) -> dict[str, Any]:
    names = list(dict.fromkeys(v.name for s in (first, second) for v in s.verdicts))
    rows = [_row(each, first, second) for each in names]
    return {
        "name": name,
        "chosen": [first.chosen, second.chosen],
        "block_size": [first.block_size, second.block_size],
        "is_same": first.chosen == second.chosen,
        "backends": rows,
        "differences": [row["name"] for row in rows if not row["is_same"]],
    }


def _row(name: str, first: Selection, second: Selection) -> dict[str, Any]:
    found = [_verdict(name, selection) for selection in (first, second)]
    mine, theirs = map(_essence, found)
    return {"name": name, "is_same": mine == theirs, "verdicts": found}


def _essence(verdict: dict[str, Any] | None) -> tuple[Any, ...] | None:
    """Return what makes two verdicts differ: not how a device is called, nor who measured."""
    if verdict is None:
        return None
    keys = ("status", "priority", "detail", "slow_features", "kv_layout", "block_size")
    reasons = [(reason["code"], reason["allowed"]) for reason in verdict["reasons"]]
    paths = [(path["rows"], path["kernel"]) for path in verdict["paths"]]
    return (reasons, paths, *(verdict[key] for key in keys))


def _verdict(name: str, selection: Selection) -> dict[str, Any] | None:
    """Return the verdict as JSON-safe values, or None where it is no candidate."""
    return next((v.to_dict() for v in selection.verdicts if v.name == name), None)


def _tables(record: dict[str, Any]) -> Iterable[RenderableType]:
    from attn_cli.views.diff import diff_tables

    return diff_tables(record)
