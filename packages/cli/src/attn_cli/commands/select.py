"""`attn select` and `attn explain`: which backend serves a request on a device, and why."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from attn_cli.environment import settings_record
from attn_cli.output import OutputFlags, emit, show, warn
from attn_cli.request_flags import RequestFlags
from attn_cli.schema import SCHEMA_VERSION

if TYPE_CHECKING:
    from rich.console import RenderableType

    from attn_shared.device import DeviceFacts
    from attn_shared.selection import Policy, Selection
    from attn_shared.settings import Settings

__all__ = ["explain", "select"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Question:
    """What was asked, where, and how much of the answer is shown."""

    flags: RequestFlags
    settings: Settings
    policy: Policy
    device: DeviceFacts | None
    is_full: bool


def select(request: RequestFlags, output: OutputFlags) -> int:
    """Choose the backend for a request, or for a whole model, on a device.

    Any device can be asked about from any machine; without --device it is this machine's first.
    With --quiet the backend's name is all that is printed, a line for each with --model.
    """
    return _answer(request, output, is_full=False)


def explain(request: RequestFlags, output: OutputFlags) -> int:
    """Choose as `attn select` does, and show every candidate with all of its reasons."""
    return _answer(request, output, is_full=True)


def _answer(flags: RequestFlags, output: OutputFlags, *, is_full: bool) -> int:
    from attn_shared.errors import AttnError

    question = _question(flags, output, is_full=is_full)
    try:
        if flags.model is not None:
            _emit_model(question, flags.model, output)
        else:
            _emit(question, output)
    except AttnError as error:
        refused: Selection | None = getattr(error, "selection", None)
        if refused is not None and not (output.as_json or output.quiet):
            show(_view(refused, is_full=is_full))
        raise
    return 0


def _question(flags: RequestFlags, output: OutputFlags, *, is_full: bool) -> _Question:
    from attn_cli.devices import named_device
    from attn_shared.selector import DEFAULT_SELECTOR
    from attn_shared.settings import from_environ

    settings = from_environ()
    warn((f"note: {note}" for note in settings.notes()), output)
    return _Question(
        flags=flags,
        settings=settings,
        policy=_policy(flags, settings),
        device=None if flags.device is None else named_device(flags.device, DEFAULT_SELECTOR),
        is_full=is_full,
    )


def _policy(flags: RequestFlags, settings: Settings) -> Policy:
    policy = settings.policy(flags.backend)
    return policy if flags.backend is None else replace(policy, source="option --backend")


def _emit(question: _Question, output: OutputFlags) -> None:
    from attn_shared.selector import DEFAULT_SELECTOR

    request = question.flags.to_request()
    selection = DEFAULT_SELECTOR.resolve(request, question.device, question.policy)
    emit(
        _record(selection, question.settings),
        output,
        tables=lambda: _view(selection, is_full=question.is_full),
        bare=[str(selection.chosen)],
    )


def _emit_model(question: _Question, path: str, output: OutputFlags) -> None:
    from attn_cli.commands.model import model_record, selection_for_model

    answer = selection_for_model(question.flags, path, question.device, question.policy)

    def tables() -> Iterable[RenderableType]:
        from attn_cli.views.model import model_brief, model_full

        return model_full(answer) if question.is_full else model_brief(answer)

    emit(model_record(answer, question.settings), output, tables=tables, bare=answer.backends)


def _view(selection: Selection, *, is_full: bool) -> Iterable[RenderableType]:
    from attn_cli.views.selection import brief, full

    return full(selection) if is_full else brief(selection)


def _record(selection: Selection, settings: Settings) -> dict[str, Any]:
    return {
        **selection.to_dict(),
        "schema_version": SCHEMA_VERSION,
        "settings": settings_record(settings),
    }
