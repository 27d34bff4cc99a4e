"""`attn select` and `attn explain`: which backend serves a request on a device, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from attn_cli.environment import settings_record
from attn_cli.output import OutputFlags, emit, show, warn
from attn_cli.request_flags import RequestFlags
from attn_cli.schema import SCHEMA_VERSION

if TYPE_CHECKING:
    from rich.console import RenderableType

    from attn_shared.selection import Policy, Selection
    from attn_shared.settings import Settings

    View = Callable[[Selection], Iterable[RenderableType]]

__all__ = ["explain", "select"]


def select(request: RequestFlags, output: OutputFlags) -> int:
    """Choose the backend for a request on a device.

    Any device can be asked about from any machine; without --device it is this machine's first.
    With --quiet the backend's name is all that is printed.
    """
    return _answer(request, output, _brief)


def explain(request: RequestFlags, output: OutputFlags) -> int:
    """Choose as `attn select` does, and show every candidate with all of its reasons."""
    return _answer(request, output, _full)


def _brief(selection: Selection) -> Iterable[RenderableType]:
    from attn_cli.views.selection import brief

    return brief(selection)


def _full(selection: Selection) -> Iterable[RenderableType]:
    from attn_cli.views.selection import full

    return full(selection)


def _answer(flags: RequestFlags, output: OutputFlags, view: View) -> int:
    from attn_shared.errors import AttnError
    from attn_shared.settings import from_environ

    settings = from_environ()
    warn((f"note: {note}" for note in settings.notes()), output)
    try:
        selection = _selection(flags, settings)
    except AttnError as error:
        refused: Selection | None = getattr(error, "selection", None)
        if refused is not None and not (output.as_json or output.quiet):
            show(view(refused))
        raise
    emit(
        _record(selection, settings),
        output,
        tables=lambda: view(selection),
        bare=[str(selection.chosen)],
    )
    return 0


def _selection(flags: RequestFlags, settings: Settings) -> Selection:
    from attn_cli.devices import named_device
    from attn_shared.selector import DEFAULT_SELECTOR

    request = flags.to_request()
    device = None if flags.device is None else named_device(flags.device, DEFAULT_SELECTOR)
    return DEFAULT_SELECTOR.resolve(request, device, _policy(flags, settings))


def _policy(flags: RequestFlags, settings: Settings) -> Policy:
    policy = settings.policy(flags.backend)
    return policy if flags.backend is None else replace(policy, source="option --backend")


def _record(selection: Selection, settings: Settings) -> dict[str, Any]:
    return {
        **selection.to_dict(),
        "schema_version": SCHEMA_VERSION,
        "settings": settings_record(settings),
    }
