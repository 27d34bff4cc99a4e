"""`attn explain NAME` and `attn explain --from ORIGIN:NAME`: what is known of a backend."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from attn_cli.commands.backends import backend_records
from attn_cli.output import OutputFlags, emit
from attn_cli.schema import SCHEMA_VERSION

if TYPE_CHECKING:
    from rich.console import RenderableType

    from attn_shared.capability import Capability
    from attn_shared.device import DeviceFacts
    from attn_shared.foreign_names import ForeignName
    from attn_shared.registry import BackendKind

__all__ = ["explain_names", "names_record"]


def explain_names(
    name: str | None, foreign: ForeignName | None, device: DeviceFacts | None, output: OutputFlags
) -> int:
    """Print what is known of a backend, by its own name or by one of other software.

    Raises:
        UnknownNameError: nobody knows the name.
    """
    record = names_record(name, foreign, device)
    names = [row["name"] for row in record["backends"]]
    emit(record, output, tables=lambda: _tables(record), bare=names)
    return 0


def names_record(
    name: str | None, foreign: ForeignName | None, device: DeviceFacts | None
) -> dict[str, Any]:
    """Return the facts as JSON-safe values.

    Args:
        name: a backend's name, in any case.
        foreign: a name of other software, if `name` is None.
        device: whose limits are shown; None leaves them out where they are of a device.

    Raises:
        UnknownNameError: nobody knows the name.
    """
    names = [name] if name is not None else list(foreign.backends if foreign else ())
    return {
        "schema_version": SCHEMA_VERSION,
        "from": None if foreign is None else _foreign_record(foreign),
        "device": None if device is None else device.to_dict(),
        "backends": [_row(each, device) for each in names],
    }


def _foreign_record(foreign: ForeignName) -> dict[str, Any]:
    return {
        "origin": foreign.origin,
        "name": foreign.name,
        "flash_attn_version": foreign.flash_attn_version,
        "note": foreign.note,
    }


def _row(name: str, device: DeviceFacts | None) -> dict[str, Any]:
    from attn_shared.foreign_names import names_elsewhere
    from attn_shared.known_backends import KNOWN_BACKENDS, KNOWN_MAMBA_BACKENDS
    from attn_shared.known_verdicts import KNOWN_NOT_PROVIDED

    row = _find(name)
    known = {**KNOWN_MAMBA_BACKENDS, **KNOWN_BACKENDS}.get(row["name"])
    is_absent = row["status"] == "not provided"
    return {
        **row,
        "status": KNOWN_NOT_PROVIDED if is_absent else row["status"],
        "plan": known.plan if known is not None and is_absent else None,
        "elsewhere": {key: list(names) for key, names in names_elsewhere(row["name"]).items()},
        **_limits(row, device),
    }


def _find(name: str) -> dict[str, Any]:
    from attn_shared.errors import UnknownNameError
    from attn_shared.registry import DEFAULT_REGISTRY

    kinds: tuple[BackendKind, ...] = ("attention", "mamba", "mla_prefill")
    rows = [row for kind in kinds for row in backend_records(DEFAULT_REGISTRY, kind)]
    for row in rows:
        if row["name"].lower() == name.lower():
            return row
    raise UnknownNameError.for_name("backend", name, {row["name"] for row in rows})


def _limits(row: dict[str, Any], device: DeviceFacts | None) -> dict[str, Any]:
    """Return what it can do on the device, or on one that it runs on."""
    from attn_shared.capability import Capability
    from attn_shared.device import PRESETS

    of_vendor = [d for d in PRESETS.values() if str(d.vendor) in row["vendors"]]
    places = of_vendor if device is None else [device]
    found = [(place, *_limits_on(row, place)) for place in places]
    known = [(p, source, limits) for p, source, limits in found if isinstance(limits, Capability)]
    if not known:
        words = next((limits for _, _, limits in found if isinstance(limits, str)), None)
        return {"limits_of": None, "limits": None, "limits_error": words}
    running = (each for each in known if any(limit.admits(each[0]) for limit in each[2].devices))
    place, source, limits = next(running, known[0])
    return {
        "limits_of": f"{source} on {place.name}",
        "limits": limits.to_dict(),
        "limits_error": None,
    }


def _limits_on(row: dict[str, Any], device: DeviceFacts) -> tuple[str, Capability | str | None]:
    """Return whose word it is, and what it says: the class's own, else what is published.

    Where the class has none for the device, what it raised instead, in its own words.
    """
    from attn_shared.errors import own_words
    from attn_shared.known_limits import SOURCE, published_limits
    from attn_shared.registry import DEFAULT_REGISTRY
    from attn_shared.selector import DEFAULT_SELECTOR

    if row["kind"] != "attention" or row["status"] == "failed":
        return "", None
    if row["status"] != "provided":
        return SOURCE, published_limits(row["name"], device)
    cls = DEFAULT_REGISTRY.load(row["name"])
    # A third party's capability may raise anything; then nothing else is known of this device.
    try:
        limits = cls.capability(device, DEFAULT_SELECTOR.inventory(device))
    except Exception as error:  # noqa: BLE001
        return "", f"its capability raised {own_words(error)} on {device.name}"
    return str(row["provided_by"]), limits


def _tables(record: dict[str, Any]) -> Iterable[RenderableType]:
    from attn_cli.views.names import names_tables

    return names_tables(record)
