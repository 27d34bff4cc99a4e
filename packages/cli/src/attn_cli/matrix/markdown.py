"""The matrix as a Markdown page."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from attn_cli.matrix.answers import Answer, Cell
from attn_cli.matrix.hardware_runs import HardwareRun
from attn_cli.matrix.merging import columns_of_all, grouped, place
from attn_cli.matrix.questions import Topic
from attn_cli.matrix.survey import BackendFacts, Matrix, Sheet
from attn_cli.matrix.tables import Entry, allowed, limits, topic_table

__all__ = ["NOT_RUN", "escaped", "markdown_page", "table"]

NOT_RUN = "°"
"""Stands beside an answer that was not run on such hardware."""

_SPECIAL = re.compile(r"[\\`*\[\]<|]|(?<!\w)_|_(?!\w)")
"""What means something inside a line; an underscore within a word does not."""

_INTRODUCTION = f"""\
Each answer is what the selector would say: the backend's capability was asked a plain request \
that differs by that feature alone. The same, from any machine: `attn matrix`.

- **yes**: served; **slow**: served by a path that is right and slow; **no**: refused, with the \
limit under [Limits](#limits).
- {NOT_RUN} marks what was **not run on hardware**: nothing of the backend ran on such a device; \
the answer follows from the capability alone. What was run is under [Runs](#runs).
- Devices with equal answers share a row. A family's name stands for its presets \
(`attn select --device NAME` takes any).
- A feature is asked by itself: a backend may refuse a combination. `attn select` answers for a \
whole request.
- Every vendor library is assumed to be installed."""


def markdown_page(matrix: Matrix, *, title: str = "Support matrix", preface: str = "") -> str:
    """Return the page.

    Args:
        matrix: what to show.
        title: its heading.
        preface: Markdown to stand below the heading.
    """
    parts = [f"# {title}", *([preface] if preface else []), _INTRODUCTION]
    parts += ["## Where each backend runs", *_where(matrix)]
    for topic in Topic:
        parts += _topic(matrix, topic)
    parts += ["## Limits", *_limits(matrix), "## Runs", *_runs(matrix.runs)]
    if matrix.not_provided:
        parts += ["## Known and not provided", *_not_provided(matrix)]
    return "\n\n".join(parts) + "\n"


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; cells are taken as Markdown."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def escaped(text: str) -> str:
    """Return words of others as Markdown that shows them literally, in a table as well."""
    return _SPECIAL.sub(r"\\\g<0>", " ".join(text.split()))


def _where(matrix: Matrix) -> Iterator[str]:
    """Yield a grid of backends and devices, then why the others are refused."""
    found = columns_of_all(matrix)
    headings = ["Backend", *(place(devices, matrix.devices) for devices in found)]
    index = {device.name: position for position, device in enumerate(matrix.devices)}
    rows = []
    for backend, sheets in matrix.sheets.items():
        cells = [sheets[index[devices[0].name]] for devices in found]
        rows.append([escaped(backend), *map(_base, cells)])
    yield table(headings, rows)
    refused = list(_refused(matrix))
    if refused:
        yield table(("Backend", "Refuses", "Because"), refused)
    yield table(
        ("Backend", "Provided by", "About", "Graph capture", "Preferred block"),
        [_facts(matrix, backend) for backend in matrix.backends],
    )


def _base(sheet: Sheet) -> str:
    return _marked(str(sheet.base.answer), sheet.base.answer, is_run=sheet.is_run)


def _marked(text: str, answer: Answer, *, is_run: bool) -> str:
    if answer.is_served:
        return text if is_run else f"{text} {NOT_RUN}"
    return f"**{text}**" if answer is Answer.NO else text


def _refused(matrix: Matrix) -> Iterator[Sequence[str]]:
    for backend, sheets in matrix.sheets.items():
        refused = [sheet for sheet in sheets if not sheet.base.answer.is_served]
        for column in grouped(refused, lambda sheet: sheet.base.essence):
            where = place(column.devices, matrix.devices)
            yield (escaped(backend), where, escaped(_why_not(column.sheet.base)))


def _why_not(base: Cell) -> str:
    if base.answer is Answer.NO:
        return f"allowed {allowed(base)}"
    return base.why()


def _facts(matrix: Matrix, backend: BackendFacts) -> Sequence[str]:
    served = [s for s in matrix.sheets[backend.name] if s.base.answer.is_served]
    preferred = [
        f"{place(column.devices, matrix.devices)}: {column.sheet.preferred}"
        for column in grouped(served, lambda sheet: sheet.preferred)
    ]
    return (
        escaped(backend.name),
        escaped(backend.provided_by),
        escaped(" · ".join(filter(None, (backend.description, backend.problem)))),
        backend.graph_level.lower().replace("_", " ") or "not known",
        "<br>".join(preferred),
    )


def _topic(matrix: Matrix, topic: Topic) -> Iterator[str]:
    found = topic_table(matrix, topic)
    if not found.rows:
        return
    yield f"## {topic}"
    rows = []
    backend = ""
    for row in found.rows:
        shown = escaped(row.backend) if row.backend != backend else ""
        backend = row.backend
        rows.append([shown, row.place, *map(_entry, row.entries)])
    yield table(("Backend", "Where", *found.headings), rows)


def _entry(entry: Entry) -> str:
    return _marked(escaped(entry.text), entry.answer, is_run=entry.is_run)


def _limits(matrix: Matrix) -> Iterator[str]:
    yield "What is refused where a backend runs, and what its capability allows instead."
    for backend in matrix.backends:
        rows = [
            (escaped(limit.asked), limit.place, escaped(limit.allowed))
            for limit in limits(matrix, backend.name)
        ]
        rules = sorted({rule for s in matrix.sheets[backend.name] for rule in s.rules})
        if rows or rules:
            yield f"### {escaped(backend.name)}"
        if rows:
            yield table(("Asked", "Where", "Allowed"), rows)
        if rules:
            yield f"Combinations are also refused by: {', '.join(f'`{rule}`' for rule in rules)}."


def _runs(runs: Sequence[HardwareRun]) -> Iterator[str]:
    if not runs:
        yield "None is on record."
        return
    rows = [
        (
            escaped(run.backend),
            escaped(f"{run.device} ({run.arch}{f', {run.cpu_level}' if run.cpu_level else ''})"),
            run.date,
            escaped(", ".join(f"{name} {version}" for name, version in run.versions)),
            escaped(f"{run.what}: {run.counts()}"),
            escaped(run.record),
        )
        for run in runs
    ]
    yield table(("Backend", "Device", "Date", "Versions", "Run", "Record"), rows)


def _not_provided(matrix: Matrix) -> Iterator[str]:
    yield "Names of the field, in vLLM's spelling, that no installed distribution provides."
    rows = [
        (
            escaped(name),
            known.family.replace("_", " "),
            ", ".join(map(str, known.vendors)) or "none",
            escaped(known.kernels),
            "planned" if known.is_planned else "not planned",
        )
        for name, known in matrix.not_provided.items()
    ]
    yield table(("Name", "Family", "Devices", "What it is", "attn"), rows)
