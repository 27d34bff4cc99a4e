"""The matrix as one HTML page that needs nothing beside itself."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from importlib import resources
from itertools import groupby

from attn_cli.matrix.answers import Answer
from attn_cli.matrix.merging import VENDOR_NAMES, columns_of_all, place
from attn_cli.matrix.questions import Question, Topic, axes_of
from attn_cli.matrix.survey import AskedDevice, Matrix, Sheet
from attn_cli.matrix.tables import allowed, summary
from attn_shared.device import Vendor

__all__ = ["html_page"]

_Group = tuple[AskedDevice, ...]


def html_page(matrix: Matrix, *, title: str = "Support matrix", note: str = "") -> str:
    """Return the page: a grid of backends' features by devices, with the reason behind each cell.

    Devices of one vendor on which every backend answers alike are one column.

    Args:
        matrix: what to show.
        title: its heading.
        note: words below the heading.
    """
    groups = columns_of_all(matrix, base_only=False)
    whys = _Whys()
    grid = "\n".join([_head(matrix, groups), *_bodies(matrix, groups, whys)])
    parts = {
        "title": escape(title),
        "note": escape(note),
        "style": _asset("page.css"),
        "script": _asset("page.js"),
        "controls": _controls(matrix),
        "grid": grid,
        "whys": json.dumps(whys.texts, ensure_ascii=False).replace("<", "\\u003c"),
        "runs": _runs(matrix),
        "not_provided": _not_provided(matrix),
    }
    page = _asset("page.html")
    for name, text in parts.items():
        page = page.replace(f"<!--{name}-->", text)
    return page


class _Whys:
    """The texts behind the cells, each kept once."""

    def __init__(self) -> None:
        self._places: dict[str, int] = {}

    @property
    def texts(self) -> list[str]:
        """The texts, by their places."""
        return list(self._places)

    def place_of(self, text: str) -> int:
        """Return the place of a text, a new one where it was not kept."""
        return self._places.setdefault(text, len(self._places))


def _asset(name: str) -> str:
    return resources.files("attn_cli.matrix").joinpath(name).read_text(encoding="utf-8").strip()


def _controls(matrix: Matrix) -> str:
    axes = {q.axis: q.label for q in matrix.questions}
    vendors = dict.fromkeys(device.facts.vendor for device in matrix.devices)
    boxes = "".join(
        f'<label><input type="checkbox" data-vendor="{vendor}" checked> '
        f"{VENDOR_NAMES[vendor]}</label>"
        for vendor in vendors
    )
    return (
        _select("backend", "Backend", {name: name for name in matrix.sheets})
        + _select("axis", "Feature", axes)
        + f'<span class="vendors">{boxes}</span>'
    )


def _select(name: str, label: str, options: dict[str, str]) -> str:
    listed = "".join(
        f'<option value="{escape(value)}">{escape(text)}</option>'
        for value, text in {"": "all", **options}.items()
    )
    return f'<label>{label} <select data-filter="{name}">{listed}</select></label>'


def _head(matrix: Matrix, groups: Sequence[_Group]) -> str:
    """Return the two heading lines: vendors, then groups of their devices."""
    vendors = [
        f'<th colspan="{len(list(members))}" scope="colgroup" class="v-{vendor}">'
        f"{VENDOR_NAMES[vendor]}</th>"
        for vendor, members in groupby(groups, key=_vendor)
    ]
    names = [_group_heading(group, matrix) for group in groups]
    return (
        f'<thead><tr><th rowspan="2" class="corner">Backend and feature</th>{"".join(vendors)}'
        f"</tr><tr>{''.join(names)}</tr></thead>"
    )


def _group_heading(group: _Group, matrix: Matrix) -> str:
    vendor = _vendor(group)
    name = place(group, matrix.devices)
    short = name.removeprefix(VENDOR_NAMES[vendor]).strip() or "all"
    members = ", ".join(device.name for device in group)
    if len(group) == 1:
        members = group[0].facts.name
    return (
        f'<th scope="col" class="v-{vendor}" data-place="{escape(name)}" '
        f'title="{escape(members)}">{escape(short)}<small>{escape(members)}</small></th>'
    )


def _vendor(group: _Group) -> Vendor:
    return group[0].facts.vendor


def _bodies(matrix: Matrix, groups: Sequence[_Group], whys: _Whys) -> Iterator[str]:
    index = {device.name: position for position, device in enumerate(matrix.devices)}
    for backend in matrix.backends:
        sheets = [matrix.sheets[backend.name][index[group[0].name]] for group in groups]
        captured = backend.graph_level.lower().replace("_", " ") or "not known"
        words = (backend.description, backend.problem, f"graph capture: {captured}")
        about = " · ".join(filter(None, words))
        rows = [
            _row(backend.name, questions, sheets, whys)
            for topic in Topic
            for questions in axes_of(topic, matrix.questions).values()
        ]
        yield (
            f'<tbody data-backend="{escape(backend.name)}"><tr class="name">'
            f'<th scope="rowgroup">{escape(backend.name)}</th>'
            f'<td colspan="{len(groups)}">{escape(about)}</td></tr>'
            f"{''.join(rows)}</tbody>"
        )


def _row(backend: str, questions: Sequence[Question], sheets: Sequence[Sheet], whys: _Whys) -> str:
    """Return a line of the grid; its heading also holds the backend, for when it stands alone."""
    axis, label = escape(questions[0].axis), escape(questions[0].label)
    heading = f'<span class="of">{escape(backend)}</span><span>{label}</span>'
    cells = "".join(_cell(questions, sheet, whys) for sheet in sheets)
    return (
        f'<tr data-axis="{axis}"><th scope="row" data-label="{label}">{heading}</th>{cells}</tr>\n'
    )


def _cell(questions: Sequence[Question], sheet: Sheet, whys: _Whys) -> str:
    cells = [sheet.cells[question.key] for question in questions]
    answer = min((cell.answer for cell in cells), key=list(Answer).index)
    text = summary(questions, cells)
    kinds = [answer.name.lower(), f"v-{sheet.device.facts.vendor}"]
    if len(text) > 12:
        kinds.append("long")
    if answer.is_served and not sheet.is_run:
        kinds.append("not-run")
    if not sheet.base.answer.is_served:
        kinds.append("refused")
    why = whys.place_of("\n".join(_why(questions, sheet)))
    return f'<td class="{" ".join(kinds)}" data-why="{why}">{escape(text)}</td>'


def _why(questions: Sequence[Question], sheet: Sheet) -> Iterator[str]:
    """Yield a line for each limit and slow path, then what was run."""
    values: dict[str, list[str]] = {}
    is_served = False
    for question in questions:
        cell = sheet.cells[question.key]
        is_served = is_served or cell.answer.is_served
        if cell.answer is Answer.NO:
            values.setdefault(f"no; allowed {allowed(cell)}", []).append(question.value)
        elif cell.detail:
            values.setdefault(f"{cell.answer}; {cell.detail}", []).append(question.value)
    for words, asked in values.items():
        listed = ", ".join(value for value in asked if value)
        yield f"{listed}: {words}" if listed else words
    if not is_served:
        return
    yield from (
        f"run on {run.device}, {run.date}: {run.what}, {run.counts()}" for run in sheet.runs
    )
    if not sheet.is_run:
        yield "not run on hardware: follows from the capability alone"


def _runs(matrix: Matrix) -> str:
    rows = [
        (
            run.backend,
            f"{run.device} ({run.arch})",
            run.date,
            ", ".join(f"{name} {version}" for name, version in run.versions),
            f"{run.what}: {run.counts()}",
            run.record,
        )
        for run in matrix.runs
    ]
    return _table(("Backend", "Device", "Date", "Versions", "Run", "Record"), rows)


def _not_provided(matrix: Matrix) -> str:
    rows = [
        (
            name,
            known.family.replace("_", " "),
            ", ".join(VENDOR_NAMES[vendor] for vendor in known.vendors),
            known.kernels,
            "planned" if known.is_planned else "not planned",
        )
        for name, known in matrix.not_provided.items()
    ]
    return _table(("Name", "Family", "Devices", "What it is", "attn"), rows)


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{escape(heading)}</th>' for heading in headings)
    body = "\n".join(
        "<tr>" + "".join(f"<td>{escape(text)}</td>" for text in row) + "</tr>" for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table>"
