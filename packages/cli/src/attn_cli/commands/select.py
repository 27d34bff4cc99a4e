"""`attn select` and `attn explain`: which backend serves a request on a device, and why."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attn_cli.commands.names import explain_names, names_record
from attn_cli.completion import complete_backend
from attn_cli.environment import settings_record
from attn_cli.options import Panel
from attn_cli.output import OutputFlags, emit, show, warn
from attn_cli.policies import foreign_name_of, prefill_resolver, resolver
from attn_cli.request_flags import RequestFlags
from attn_cli.schema import SCHEMA_VERSION
from attn_shared.errors import InvalidInputError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from attn_shared.device import DeviceFacts
    from attn_shared.request import AttentionRequest
    from attn_shared.selection import Selection
    from attn_shared.settings import Settings

__all__ = ["ExplainFlags", "explain", "select"]

_IN_FULL = "attn explain, with the same options, says of each what is allowed."


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainFlags:
    """What `attn explain` asks beside a request."""

    name: Annotated[
        str | None,
        typer.Argument(
            help="A backend: show what is known of it, provided or not.",
            metavar="BACKEND",
            autocompletion=complete_backend,
        ),
    ] = None
    diff: Annotated[
        tuple[str, str] | None,
        Panel("Where and what").word(
            "--diff", "Show what differs between two devices.", "DEVICE DEVICE"
        ),
    ] = None


def select(request: RequestFlags, output: OutputFlags) -> int:
    """Choose the backend for a request, or for a whole model, on a device.

    Any device can be asked about from any machine; without --device it is this machine's first.
    With --quiet the backend's name is all that is printed, a line for each with --model.
    """
    _refuse_unused(request)
    return _answer(request, output, _settings(output), is_full=False)


def explain(explained: ExplainFlags, request: RequestFlags, output: OutputFlags) -> int:
    """Choose as `attn select` does, and show every candidate with all of its reasons.

    Without a request, say what is known of a backend: `attn explain FLASHMLA`, `attn explain
    --from sglang:triton`. With --diff, answer for two devices beside each other.
    """
    settings = _settings(output)
    _refuse_together(explained, request)
    _refuse_unused(request, has_devices=explained.diff is not None)
    if explained.diff is not None:
        from attn_cli.commands.diff import explain_diff

        return explain_diff(request, explained.diff, settings, output)
    is_asked = request.num_heads is not None or request.model is not None
    if not is_asked and (explained.name is not None or request.from_name is not None):
        _refuse_half_a_request(request)
        return explain_names(explained.name, foreign_name_of(request), _device(request), output)
    return _answer(request, output, settings, is_full=True, about=explained.name)


def _refuse_together(explained: ExplainFlags, request: RequestFlags) -> None:
    """Refuse a backend's name beside what answers without it."""
    others = {
        "--diff": explained.diff is not None,
        "--model": request.model is not None,
        "--from": request.from_name is not None,
    }
    for option, is_given in others.items():
        if explained.name is not None and is_given:
            raise InvalidInputError.for_argument(
                "BACKEND", f"{explained.name!r} together with {option}", "one of them"
            )


def _refuse_half_a_request(request: RequestFlags) -> None:
    """Refuse flags of a request beside a name where no request is made.

    Raises:
        InvalidInputError: names them, and what makes a request.
    """
    used = {"device", "from_name", "num_heads", "model"}
    given = [
        f"--{item.name.replace('_', '-')}"
        for item in fields(request)
        if item.name not in used and getattr(request, item.name) != item.default
    ]
    if given:
        raise InvalidInputError.for_argument(
            ", ".join(given),
            "given without a request",
            "with --num-heads and --head-size, or --model",
            hint="what is known of a backend depends on --device alone.",
        )


def _refuse_unused(request: RequestFlags, *, has_devices: bool = False) -> None:
    """Refuse flags that the answer would leave aside."""
    if request.max_model_len is not None and request.model is None:
        raise InvalidInputError.for_argument(
            "--max-model-len", request.max_model_len, "with --model, whose sequences it bounds"
        )
    if has_devices and request.device is not None:
        raise InvalidInputError.for_argument(
            "--device", f"{request.device!r} together with --diff", "one of them"
        )


def _settings(output: OutputFlags) -> Settings:
    from attn_shared.settings import from_environ

    settings = from_environ()
    warn((f"note: {note}" for note in settings.notes()), output)
    return settings


def _device(flags: RequestFlags) -> DeviceFacts | None:
    from attn_cli.devices import named_device
    from attn_shared.selector import DEFAULT_SELECTOR

    return None if flags.device is None else named_device(flags.device, DEFAULT_SELECTOR)


def _answer(
    flags: RequestFlags,
    output: OutputFlags,
    settings: Settings,
    *,
    is_full: bool,
    about: str | None = None,
) -> int:
    from attn_shared.errors import AttnError, NoBackendError

    try:
        if flags.model is not None:
            _emit_model(flags, flags.model, output, settings, is_full=is_full)
        else:
            _emit(flags, output, settings, is_full=is_full, about=about)
    except AttnError as error:
        refused: Selection | None = getattr(error, "selection", None)
        if refused is not None and not (output.as_json or output.quiet):
            show(_view(refused, is_full=is_full))
            if not is_full and type(error) is NoBackendError:
                error.hint = _IN_FULL  # a brief line has no room for what is allowed
        raise
    return 0


def _emit(
    flags: RequestFlags,
    output: OutputFlags,
    settings: Settings,
    *,
    is_full: bool,
    about: str | None,
) -> None:
    request = flags.to_request()
    device = _device(flags)
    facts = None if about is None else names_record(about, None, device)
    selection = resolver(flags, settings, device)(request)
    record = _record(selection, settings, is_full=is_full)
    prefill = _prefill(flags, request, device)
    if prefill is not None:
        record["prefill"] = prefill.to_dict()

    def tables() -> Iterable[RenderableType]:
        if facts is not None:
            from attn_cli.views.names import names_tables

            yield from names_tables(facts)
            yield ""
        yield from _view(selection, is_full=is_full)
        if prefill is not None:
            from attn_cli.views.selection import prefill_part

            yield from prefill_part(prefill, is_full=is_full)

    if facts is not None:
        record["about"] = facts["backends"]
    emit(record, output, tables=tables, bare=[str(selection.chosen)])


def _prefill(
    flags: RequestFlags, request: AttentionRequest, device: DeviceFacts | None
) -> Selection | None:
    """Choose what prefills a layer of latents; None for every other layer."""
    from attn_shared.model_selection import select_prefill

    return select_prefill(request, prefill_resolver(flags, device))


def _emit_model(
    flags: RequestFlags, path: str, output: OutputFlags, settings: Settings, *, is_full: bool
) -> None:
    from attn_cli.model_flags import model_of
    from attn_shared.model_selection import select_model

    model = model_of(flags, path)
    device = _device(flags)
    answer = select_model(model, resolver(flags, settings, device), prefill_resolver(flags, device))
    record = {
        **answer.to_dict(),
        "schema_version": SCHEMA_VERSION,
        "settings": settings_record(settings),
    }

    def tables() -> Iterable[RenderableType]:
        from attn_cli.views.model import model_brief, model_full

        return model_full(answer) if is_full else model_brief(answer)

    emit(record, output, tables=tables, bare=answer.backends)


def _view(selection: Selection, *, is_full: bool) -> Iterable[RenderableType]:
    from attn_cli.views.selection import brief, full

    return full(selection) if is_full else brief(selection)


def _record(selection: Selection, settings: Settings, *, is_full: bool) -> dict[str, Any]:
    record = {
        **selection.to_dict(),
        "schema_version": SCHEMA_VERSION,
        "settings": settings_record(settings),
    }
    if is_full:
        from attn_shared.known_verdicts import known_verdicts

        found = known_verdicts(selection.request, selection.device)
        record["not_provided"] = [verdict.to_dict() for verdict in found]
    return record
