"""What `attn matrix` shows: a symbol per feature, then formats and sizes, both by devices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

from rich.console import Console, ConsoleOptions, RenderableType
from rich.text import Text

from attn_cli.matrix.answers import Answer, Cell
from attn_cli.matrix.merging import Column, grouped, place
from attn_cli.matrix.questions import Question, Topic, axes_of
from attn_cli.matrix.survey import Matrix, Sheet
from attn_cli.matrix.tables import allowed, summary
from attn_cli.views.layout import indented, notes_block, section

__all__ = ["SymbolGrid", "matrix_tables", "symbol"]

_RUN: Mapping[Answer, str] = MappingProxyType({Answer.YES: "●", Answer.SLOW: "◆"})
_NOT_RUN: Mapping[Answer, str] = MappingProxyType({Answer.YES: "○", Answer.SLOW: "◇"})
_OTHERS: Mapping[Answer, str] = MappingProxyType(
    {Answer.NO: "·", Answer.UNAVAILABLE: "!", Answer.UNKNOWN: "?", Answer.NO_QUESTION: " "}
)
_STYLES: Mapping[Answer, str] = MappingProxyType(
    {
        Answer.YES: "green",
        Answer.SLOW: "yellow",
        Answer.NO: "red",
        Answer.UNAVAILABLE: "bold red",
        Answer.UNKNOWN: "magenta",
        Answer.NO_QUESTION: "dim",
    }
)

_LEGEND: Mapping[Answer, str] = MappingProxyType(
    {
        Answer.YES: "yes",
        Answer.SLOW: "slow: right, not the fast kernel",
        Answer.NO: "no",
        Answer.UNKNOWN: "not probed",
    }
)

_AS_SYMBOLS = ("kind", "attn_type")
"""Quantities whose every value is a symbol; of the others, features alone are."""

_LEAST_LABEL = 24


def matrix_tables(matrix: Matrix) -> Iterator[RenderableType]:
    """Return the symbols, the formats and sizes, and what must be known beside them."""
    yield SymbolGrid(matrix=matrix)
    yield Text()
    yield from _legend()
    yield section("Formats and sizes, of those that were asked")
    for backend, sheets in matrix.sheets.items():
        served = [sheet for sheet in sheets if sheet.base.answer.is_served]
        if served:
            yield Text(backend, style="bold")
        for column in grouped(served, partial(_words, matrix)):
            where = (f"{place(column.devices, matrix.devices)}: ", "cyan")
            words = [
                Text.assemble((f"{label} ", "dim"), served)
                for label, served in _words(matrix, column.sheet)
            ]
            yield indented(Text.assemble(where, Text("; ").join(words)))
    yield Text()
    yield notes_block(_notes(matrix))


def _legend() -> Iterator[Text]:
    """Yield what the symbols mean, in their colours."""
    yield Text("   ").join(
        symbol(Cell(answer=answer), is_run=True).append(f" {words}", style="default")
        for answer, words in _LEGEND.items()
    )
    hollow = [symbol(Cell(answer=answer), is_run=False) for answer in _NOT_RUN]
    yield Text(" ").join([*hollow, Text("the same, not run on such hardware")])


def symbol(cell: Cell, *, is_run: bool) -> Text:
    """Return a cell as one character in its colour: full if such hardware was tried."""
    symbols = {**_OTHERS, **(_RUN if is_run else _NOT_RUN)}
    return Text(symbols[cell.answer], style=_STYLES[cell.answer])


@dataclass(frozen=True, slots=True)
class SymbolGrid:
    """Backends by devices as rows, features as columns of one character under slanted headings."""

    matrix: Matrix

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        """Lay out in the width that there is."""
        groups = _symbol_groups(self.matrix)
        grid = sum(2 * len(group) for group in groups) + len(groups) - 1
        rows = list(_rows(self.matrix))
        longest = max((len(label) for label, _ in rows), default=0)
        label_width = max(_LEAST_LABEL, min(options.max_width - grid - 1, longest + 4))
        yield from _headings(groups, label_width)
        for label, column in rows:
            if column is None:
                yield Text(label, style="bold")
                continue
            answers = _answers(column.sheet, groups)
            room = max(grid, options.max_width - label_width)
            yield from _beside(console, label, label_width, answers, room)


def _symbol_groups(matrix: Matrix) -> list[list[Question]]:
    """Return the questions that become symbols, by topic."""
    groups = [
        [q for q in matrix.questions if q.topic is topic and _is_symbol(q)] for topic in Topic
    ]
    return [group for group in groups if group]


def _is_symbol(question: Question) -> bool:
    return not question.value or question.axis in _AS_SYMBOLS


def _rows(matrix: Matrix) -> Iterator[tuple[str, Column | None]]:
    """Yield each backend's name, then its devices, those of equal symbols together."""
    symbols = [question.key for group in _symbol_groups(matrix) for question in group]
    for backend, sheets in matrix.sheets.items():
        yield backend, None

        def shown(sheet: Sheet) -> tuple[object, ...]:
            if not sheet.base.answer.is_served:
                return (sheet.base.essence,)
            return (*(sheet.cells[key].answer for key in symbols), sheet.is_run)

        for column in grouped(sheets, shown):
            yield place(column.devices, matrix.devices), column


def _headings(groups: Sequence[Sequence[Question]], label_width: int) -> Iterator[Text]:
    """Yield a line per column, the last one first, so that each name ends above its column."""
    names = [[question.value or question.label for question in group] for group in groups]
    flat = [name for group in names for name in group]
    starts = _starts([len(group) for group in names], label_width)
    for index in reversed(range(len(flat))):
        line = [" "] * (starts[-1] + 1)
        for start in starts[index + 1 :]:
            line[start] = "│"
        line[starts[index]] = "┐"
        text = "".join(line)
        name = f"{flat[index]} "
        head = f"{name:>{starts[index]}}"[-starts[index] :]
        yield Text.assemble((head, "bold"), (text[starts[index] :], "dim"), no_wrap=True)


def _starts(sizes: Sequence[int], label_width: int) -> list[int]:
    """Return where each column stands: two apart, a group one more."""
    starts, position = [], label_width
    for size in sizes:
        starts += [position + 2 * index for index in range(size)]
        position += 2 * size + 1
    return starts


def _answers(sheet: Sheet, groups: Sequence[Sequence[Question]]) -> Text:
    """Return the symbols of a row, or why there are none."""
    base = sheet.base
    if base.answer is Answer.NO:
        return Text.assemble(("no", "red"), f" (allowed {allowed(base)})")
    if not base.answer.is_served:
        return Text.assemble((str(base.answer), _STYLES[base.answer]), f": {base.detail}")
    parts = []
    for group in groups:
        cells = [symbol(sheet.cells[question.key], is_run=sheet.is_run) for question in group]
        parts.append(Text(" ").join(cells))
    return Text("  ").join(parts)


def _beside(
    console: Console, label: str, label_width: int, answers: Text, room: int
) -> Iterator[Text]:
    """Yield the lines of a label with the answers to its right, both wrapped."""
    left = Text(label).wrap(console, label_width - 3)
    right = answers.wrap(console, room) if len(answers) > room else [answers]
    for index in range(max(len(left), len(right))):
        line = Text("  ")
        line.append_text(left[index] if index < len(left) else Text())
        line.pad_right(label_width - len(line))
        line.append_text(right[index] if index < len(right) else Text())
        yield line


def _words(matrix: Matrix, sheet: Sheet) -> tuple[tuple[str, str], ...]:
    """Return what is served of formats and sizes: each with its label."""
    parts = []
    for topic in Topic:
        for axis in axes_of(topic, matrix.questions).values():
            if not _is_symbol(axis[0]):
                cells = [sheet.cells[question.key] for question in axis]
                parts.append((axis[0].label, summary(axis, cells)))
    if sheet.preferred:
        parts.append(("preferred block", sheet.preferred))
    return tuple(parts)


def _notes(matrix: Matrix) -> Iterator[str]:
    if any(device.facts.is_simulated for device in matrix.devices):
        yield "for devices that are not here, every vendor library is assumed to be installed"
    for backend in matrix.backends:
        if backend.problem:
            yield f"{backend.name}: {backend.problem}"
    yield "attn matrix --format markdown, html or json gives the limit behind each no"
