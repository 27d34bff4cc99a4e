"""The matrix as tables of words: what the terminal and the Markdown page both show."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from attn_cli.matrix.answers import Answer, Cell
from attn_cli.matrix.merging import grouped, place
from attn_cli.matrix.questions import Question, Topic, axes_of
from attn_cli.matrix.survey import AskedDevice, Matrix, Sheet

__all__ = ["Entry", "Limit", "Row", "TopicTable", "allowed", "limits", "summary", "topic_table"]

NOT_ASKED = "n/a"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One field of a table.

    Attributes:
        text: what it says.
        answer: the best of the answers that it stands for.
        is_run: something of the backend was run on such hardware.
    """

    text: str
    answer: Answer
    is_run: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One backend on devices that answer alike."""

    backend: str
    place: str
    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicTable:
    """The questions of a topic: a column per axis, a row per backend and group of devices."""

    topic: Topic
    headings: tuple[str, ...]
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """What a backend refuses, and what it allows instead.

    Attributes:
        backend: the backend.
        place: the devices.
        asked: what was asked for, in words.
        allowed: the limits, in the backend's words.
    """

    backend: str
    place: str
    asked: str
    allowed: str


def topic_table(matrix: Matrix, topic: Topic) -> TopicTable:
    """Return the table of a topic, of the devices that each backend runs on."""
    axes = axes_of(topic, matrix.questions)
    rows: list[Row] = []
    for backend, sheets in matrix.sheets.items():
        served = [sheet for sheet in sheets if sheet.base.answer.is_served]
        for column in grouped(served, lambda sheet: _shown(sheet, axes.values())):
            entries = tuple(_entry(column.sheet, axis) for axis in axes.values())
            where = place(column.devices, matrix.devices)
            rows.append(Row(backend=backend, place=where, entries=entries))
    headings = tuple(questions[0].label for questions in axes.values())
    return TopicTable(topic=topic, headings=headings, rows=tuple(rows))


def _shown(sheet: Sheet, axes: Iterable[Sequence[Question]]) -> tuple[object, ...]:
    """What a row shows of a sheet; sheets that differ in the reasons alone share a row."""
    answers = (sheet.cells[question.key].answer for axis in axes for question in axis)
    return (*answers, sheet.is_run)


def _entry(sheet: Sheet, axis: Sequence[Question]) -> Entry:
    cells = [sheet.cells[question.key] for question in axis]
    best = min((cell.answer for cell in cells), key=list(Answer).index)
    return Entry(text=summary(axis, cells), answer=best, is_run=sheet.is_run)


def summary(axis: Sequence[Question], cells: Sequence[Cell]) -> str:
    """Return the answers to the questions of one axis in a few words.

    A feature has one answer. Of a quantity, the values that are served are listed, three or more
    that were asked one after another as "32-256".
    """
    if len(axis) == 1 and not axis[0].value:
        answer = cells[0].answer
        return NOT_ASKED if answer is Answer.NO_QUESTION else str(answer)
    parts = []
    for answer in (Answer.YES, Answer.SLOW, Answer.UNKNOWN):
        is_so = [cell.answer is answer for cell in cells]
        values = ", ".join(_spans([question.value for question in axis], is_so))
        if values:
            parts.append(values if answer is Answer.YES else f"{answer}: {values}")
    is_asked = any(cell.answer is not Answer.NO_QUESTION for cell in cells)
    return "; ".join(parts) or ("none" if is_asked else NOT_ASKED)


def _spans(values: Sequence[str], is_so: Sequence[bool]) -> Iterator[str]:
    """Yield the values that are so, numbers that follow one another as a span."""
    run: list[str] = []
    for value, holds in [*zip(values, is_so, strict=True), ("", False)]:
        if holds:
            run.append(value)
            continue
        if len(run) >= 3 and all(item.isdecimal() for item in run):
            yield f"{run[0]}-{run[-1]}"
        else:
            yield from run
        run = []


def limits(matrix: Matrix, backend: str) -> list[Limit]:
    """Return all that a backend refuses where it runs, with what it allows."""
    found: dict[tuple[str, str], list[AskedDevice]] = {}
    for sheet in matrix.sheets[backend]:
        if sheet.base.answer.is_served:
            for refusal in _refusals(sheet, matrix.questions):
                found.setdefault(refusal, []).append(sheet.device)
    return [
        Limit(
            backend=backend,
            place=place(devices, matrix.devices),
            asked=asked,
            allowed=limit,
        )
        for (asked, limit), devices in found.items()
    ]


def _refusals(sheet: Sheet, questions: Iterable[Question]) -> Iterator[tuple[str, str]]:
    """Yield what is refused and what is allowed, the values of one axis and limit together."""
    values: dict[tuple[str, str], list[str]] = {}
    for question in questions:
        cell = sheet.cells[question.key]
        if cell.answer is Answer.NO:
            values.setdefault((question.label, allowed(cell)), []).append(question.value)
    for (label, limit), refused in values.items():
        listed = ", ".join(value for value in refused if value)
        yield (f"{label}: {listed}" if listed else label, limit)


def allowed(cell: Cell) -> str:
    """Return the limits behind a no, without the value that was asked for: "dcp: 1"."""
    return "; ".join(
        f"{reason.code}: {reason.allowed}" + (f" ({reason.hint})" if reason.hint else "")
        for reason in cell.reasons
    )
