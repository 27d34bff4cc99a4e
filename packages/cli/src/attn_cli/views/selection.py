"""A selection as tables: the choice, a line per candidate, or all of their reasons."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from attn_cli.views.layout import column_table, indented, notes_block, status_text
from attn_shared.capability import Reason
from attn_shared.known_limits import SOURCE
from attn_shared.known_verdicts import KnownVerdict, known_verdicts
from attn_shared.request import AttentionRequest
from attn_shared.selection import DecidedBy, Selection, Verdict, VerdictStatus

__all__ = ["asked", "brief", "choice", "full", "kernel_paths", "prefill_part", "verdicts"]


def brief(selection: Selection) -> Iterator[RenderableType]:
    """Return the choice and one short line per candidate."""
    yield choice(selection)
    yield Text()
    yield _verdict_table(selection, _short_why)
    yield Text()
    yield notes_block(selection.notes())


def full(selection: Selection) -> Iterator[RenderableType]:
    """Return the request, the choice, and each candidate with every reason in full."""
    yield asked(selection.request)
    yield choice(selection)
    yield Text()
    yield from kernel_paths(selection)
    yield verdicts(selection)
    yield Text()
    yield from _alternatives(selection)
    yield from _not_provided(selection)
    yield notes_block(selection.notes())


def prefill_part(selection: Selection, *, is_full: bool) -> Iterator[RenderableType]:
    """Return what prefills a layer of latents, with a line or all reasons per candidate."""
    yield Text()
    yield Text.assemble((str(selection.chosen), "bold green"), " prefills")
    yield Text()
    if is_full:
        yield from kernel_paths(selection)
    why = _long_why if is_full else _short_why
    yield _verdict_table(selection, why, is_airy=is_full, title="Prefill")


def verdicts(selection: Selection) -> RenderableType:
    """Return every candidate with each of its reasons in full."""
    return _verdict_table(selection, _long_why, is_airy=True)


def kernel_paths(selection: Selection) -> Iterator[RenderableType]:
    """Return on which of its kernels the chosen backend runs what; nothing where it has one way."""
    chosen = next((v for v in selection.verdicts if v.name == selection.chosen), None)
    if chosen is None or not chosen.paths:
        return
    for path in chosen.paths:
        yield Text.assemble((f"{path.rows}: ", "bold"), path.kernel)
        yield indented(Text(path.why, style="dim"))
    yield Text()


def choice(selection: Selection) -> Text:
    """Return the chosen backend, where it runs, its block size and layout, and who decided."""
    device = selection.device
    place = f" on {device.name} ({device.arch})"
    if selection.chosen is None:
        return Text.assemble(("No backend", "bold red"), place)
    parts = [
        f"block size {selection.block_size}" if selection.block_size else "no cache",
        f"KV layout {selection.kv_layout}" if selection.block_size else "",
        f"decided by {_decider(selection)}",
    ]
    details = ", ".join(part for part in parts if part)
    return Text.assemble((selection.chosen, "bold green"), place, "\n", details)


def _alternatives(selection: Selection) -> Iterator[RenderableType]:
    """Say who would come first and who comes next, and what it would take to get them."""
    found = [("Before it", verdict) for verdict in selection.ahead() if selection.chosen]
    runner_up = selection.runner_up()
    if runner_up is not None:
        is_served = runner_up.status is VerdictStatus.ELIGIBLE
        found.append(("Next" if is_served else "Nearest", runner_up))
    for word, verdict in found:
        head = Text.assemble((f"{word}: ", "bold"), verdict.name)
        yield Group(head, *(indented(Text(step)) for step in verdict.steps()))
    if found:
        yield Text()


def _not_provided(selection: Selection) -> Iterator[RenderableType]:
    """Show what the field has for such a request and nothing installed provides."""
    found = known_verdicts(selection.request, selection.device)
    if not found:
        return
    rows = [(verdict.name, Group(*_known_lines(verdict))) for verdict in found]
    yield column_table(("Known, not provided", "About"), rows)
    yield Text()


def _known_lines(verdict: KnownVerdict) -> Iterator[RenderableType]:
    yield Text(f"{verdict.known.kernels}; {verdict.known.plan}")
    if verdict.would_serve:
        yield Text(f"would serve this, by the limits of {SOURCE}", style="green")
    for reason in verdict.reasons or ():
        text = f"{reason.code} = {reason.value}, allowed: {reason.allowed}"
        yield indented(Text(text, style="dim"))


def _decider(selection: Selection) -> str:
    match selection.decided_by:
        case DecidedBy.USER:
            return f"the user ({selection.policy.source})"
        case DecidedBy.MODEL:
            return "the model's requirement"
        case DecidedBy.PREFERENCE:
            return f"preference of {', '.join(selection.policy.prefer)}"
        case DecidedBy.MEASURED:
            return "measurement on this device"
        case DecidedBy.DEFAULT:
            return "default order"


def asked(request: AttentionRequest) -> Text:
    """Return the heads, and every other field that is not at its default."""
    words = [
        f"{request.num_heads} query heads",
        f"{request.num_kv_heads} kv heads",
        f"head size {request.head_size}",
    ]
    values = request.to_dict()
    words.append(str(values["dtype"]))
    for field in dataclasses.fields(request):
        is_default = getattr(request, field.name) == field.default
        if field.default is not dataclasses.MISSING and field.name != "dtype" and not is_default:
            words.append(f"{field.name}={_short_value(values[field.name])}")
    return Text.assemble(("Asked: ", "bold"), ", ".join(words))


def _short_value(value: object) -> str:
    if isinstance(value, dict):
        return "(" + ", ".join(f"{key}={item}" for key, item in value.items()) + ")"
    return str(value)


def _verdict_table(
    selection: Selection,
    why: Callable[[Verdict], RenderableType],
    *,
    is_airy: bool = False,
    title: str = "Backend",
) -> RenderableType:
    rows = [(v.name, status_text(str(v.status)), why(v)) for v in selection.verdicts]
    return column_table((title, "Verdict", "Why"), rows, is_airy=is_airy)


def _short_why(verdict: Verdict) -> Text:
    if verdict.status is VerdictStatus.REJECTED:
        return Text(", ".join(f"{reason.code} {reason.value}" for reason in verdict.reasons))
    lines = list(_own_words(verdict))
    if verdict.priority is not None:
        lines.append(Text(f"priority {verdict.priority}"))
    return Text("\n").join(lines)


def _long_why(verdict: Verdict) -> RenderableType:
    if verdict.status is VerdictStatus.REJECTED:
        return Group(*(line for reason in verdict.reasons for line in _reason_lines(reason)))
    lines = list(_own_words(verdict))
    if verdict.priority is not None:
        rank = (f"priority {verdict.priority}: ", "dim")
        lines.append(Text.assemble(rank, verdict.provenance))
    return Group(*lines)


def _reason_lines(reason: Reason) -> Iterator[RenderableType]:
    yield Text.assemble((reason.code, "bold"), f" = {reason.value}")
    yield indented(Text.assemble(("allowed: ", "dim"), reason.allowed))
    if reason.hint:
        yield indented(Text.assemble(("hint: ", "dim"), reason.hint))


def _own_words(verdict: Verdict) -> Iterator[Text]:
    """What is no reason and no rank: the library's own words, slow paths."""
    if verdict.detail:
        yield Text(verdict.detail)
    if verdict.slow_features:
        yield Text(f"slow path for: {', '.join(verdict.slow_features)}")
    if verdict.is_promoted:
        yield Text("preferred by the policy")
    if verdict.priority is None:
        yield Text("by name only")
