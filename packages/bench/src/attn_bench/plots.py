"""Results as a picture: how far from the machine's limit, and how a backend stands to its peers.

Colours and text are of middle brightness on a transparent ground, so that one file is readable on
a light and on a dark page.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from attn_bench.medians import median
from attn_bench.results import Cell, Results
from attn_bench.tables import headline, rate_words
from attn_bench.units import figures, flops, ratio_words
from attn_shared.errors import InvalidInputError, VendorMissingError

__all__ = ["FORMATS", "check_plot_path", "draw", "save_plot"]

FORMATS = (".png", ".svg")

Axes: TypeAlias = Any
"""matplotlib.axes.Axes; matplotlib is an extra, which only functions import."""

Figure: TypeAlias = Any
"""matplotlib.figure.Figure."""

_INK = "#7d8590"
_GRID = "#7d859040"
_READ, _MATMUL = "#2f9e8f", "#a371f7"
_PEERS = ("#d9822b", "#4184e4", "#c2549d", "#8f8f2e")
_WIDTH = 9.0  # inches
_LEFT = 0.215  # of the width, for the names of workloads, where that is enough
_CHARACTER = 0.072  # of such a name, inches; "@" and "+" are wide
_ROW = 0.16  # of one bar, inches
_GAP = 0.07  # between rows, inches
_PANEL = 0.85  # of a panel's title and axis, inches
_NOTE_CHARACTERS = 130  # of a line of notes
_HEAD = 1.0  # of the figure's title and key, inches
_DPI = 160
_STYLE = {
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "axes.titlecolor": _INK,
    "font.size": 8,
    "svg.hashsalt": "attn-bench",
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
}


def check_plot_path(path: Path) -> None:
    """Refuse a plot that could not be drawn, before anything is measured.

    Raises:
        InvalidInputError: the file's ending is no format that is drawn.
        VendorMissingError: matplotlib is not installed.
    """
    if path.suffix.lower() not in FORMATS:
        raise InvalidInputError.for_argument(
            "plot", repr(str(path)), f"a file that ends in {' or '.join(FORMATS)}"
        )
    _figure_class()


def _figure_class() -> Any:
    try:
        from matplotlib import figure
    except ImportError as error:
        raise VendorMissingError(
            f"a plot needs matplotlib, which cannot be imported: {error}.",
            library="matplotlib",
            hint="run: pip install matplotlib",
        ) from error
    return figure.Figure


def save_plot(results: Results, path: Path) -> None:
    """Draw the results into a file.

    Raises:
        InvalidInputError: there is nothing to draw, or the file cannot be written.
        VendorMissingError: matplotlib is not installed.
    """
    check_plot_path(path)
    import matplotlib

    metadata = {"Date": None} if path.suffix.lower() == ".svg" else None
    figure = draw(results)
    try:
        with matplotlib.rc_context(_STYLE):
            figure.savefig(path, dpi=_DPI, transparent=True, metadata=metadata)
    except OSError as error:
        raise InvalidInputError.for_argument(
            "plot", f"{str(path)!r} ({error.strerror or error})", "a file that can be written"
        ) from error


@dataclass(frozen=True, slots=True)
class _Row:
    """One workload of a panel, with its cells: one per peer, or one without."""

    name: str
    cells: tuple[Cell, ...]

    def beside(self, peer: str) -> Cell | None:
        """Return the cell of a peer, if it was measured."""
        return next((cell for cell in self.cells if cell.peer == peer), None)


@dataclass(frozen=True, slots=True)
class _Panel:
    """One backend and one layer."""

    title: str
    rows: tuple[_Row, ...]

    @property
    def peers(self) -> list[str]:
        """Those that some row was measured beside, in the order of their first cell."""
        cells = (cell for row in self.rows for cell in row.cells)
        return list(dict.fromkeys(cell.peer for cell in cells if cell.peer is not None))

    @property
    def inches(self) -> float:
        """Its height."""
        return len(self.rows) * (max(1, len(self.peers)) * _ROW + _GAP) + _PANEL


def _panels(cells: Sequence[Cell]) -> Iterator[_Panel]:
    groups: dict[str, dict[str, list[Cell]]] = {}
    for cell in cells:
        cache = "" if cell.kv_cache_dtype == "auto" else f", {cell.kv_cache_dtype} cache"
        title = f"{cell.backend}    heads {cell.heads}, {cell.dtype}{cache}"
        rows = groups.setdefault(title, {})
        rows.setdefault(f"{cell.phase.replace('_', ' ')} {cell.label}", []).append(cell)
    for title, rows in groups.items():
        yield _Panel(title, tuple(_Row(name, tuple(own)) for name, own in rows.items()))


def draw(results: Results) -> Figure:
    """Return the figure: a pair of panels for each backend and layer.

    Raises:
        InvalidInputError: no cell was measured.
        VendorMissingError: matplotlib is not installed.
    """
    if not results.cells:
        raise InvalidInputError.for_argument("cells", "none", "at least one measured cell to draw")
    make = _figure_class()
    import matplotlib

    with matplotlib.rc_context(_STYLE):
        return _drawn(results, make)


def _drawn(results: Results, make: Any) -> Figure:
    panels = list(_panels(results.cells))
    peers = list(dict.fromkeys(cell.peer for cell in results.cells if cell.peer is not None))
    heights = [panel.inches for panel in panels]
    notes = _note_lines(results.machine.notes)
    head = _HEAD + 0.16 * len(notes)
    total = sum(heights) + head
    figure = make(figsize=(_WIDTH, total))
    columns = 2 if peers else 1
    longest = max(len(row.name) for panel in panels for row in panel.rows)
    left = max(_LEFT, 0.01 + longest * _CHARACTER / _WIDTH)
    top = total - head
    for panel, height in zip(panels, heights, strict=True):
        figure.text(0.02, (top - 0.22) / total, panel.title, fontsize=9, fontweight="bold")
        axes = _axes_of(figure, columns, left, top / total, height / total, height)
        _draw_rates(axes[0], panel, _limit_words(panel))
        if peers:
            _draw_ratios(axes[1], panel, peers, _ratio_range(results.cells))
        top -= height
    _draw_head(figure, results, notes, peers, total)
    return figure


def _note_lines(notes: Sequence[str]) -> list[str]:
    return textwrap.wrap("; ".join(notes), _NOTE_CHARACTERS)


def _axes_of(
    figure: Figure, columns: int, left: float, top: float, share: float, inches: float
) -> list[Axes]:
    """Return the axes of one panel: rates, and beside them ratios."""
    bottom = top - share + 0.45 * share / inches
    height = share * (1 - _PANEL / inches)
    right, gap = 0.97, 0.05
    width = (right - left - gap * (columns - 1)) / columns
    return [
        figure.add_axes((left + index * (width + gap), bottom, width, height))
        for index in range(columns)
    ]


def _prepare(axes: Axes, rows: Sequence[_Row], *, with_names: bool) -> None:
    axes.set_facecolor("none")
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_yticks(range(len(rows)), [row.name for row in rows] if with_names else [])
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color=_GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _limit_words(panel: _Panel) -> str:
    """Return what 100 % stands for in the middle of the panel's cells: it moves with the load."""
    cells = [row.cells[0] for row in panel.rows]
    read = median(cell.gb_per_s / cell.share_of_read for cell in cells)
    matmul = median(cell.tflop_per_s / cell.share_of_matmul for cell in cells)
    return f"limit: about {figures(read)} GB/s, {flops(matmul)}"


def _draw_rates(axes: Axes, panel: _Panel, limit: str) -> None:
    """Draw the share of the nearer limit, with the rate itself beside each bar."""
    _prepare(axes, panel.rows, with_names=True)
    shares = []
    for place, row in enumerate(panel.rows):
        cell = row.cells[0]
        share = 100 * max(cell.share_of_read, cell.share_of_matmul)
        shares.append(share)
        is_read = cell.share_of_read >= cell.share_of_matmul
        axes.barh(place, share, height=0.62, color=_READ if is_read else _MATMUL)
        axes.text(share, place, f"  {rate_words(cell)}", va="center", ha="left", fontsize=7)
    axes.set_xlim(0, max(130.0, 1.3 * max(shares)))
    axes.axvline(100, color=_INK, linewidth=1)
    axes.text(100, -0.55, limit, ha="center", va="bottom", fontsize=7)
    axes.set_xticks([0, 25, 50, 75, 100], ["0", "25", "50", "75", "100 %"])
    axes.set_xlabel("share of the limit measured in the same rounds", fontsize=7)


def _draw_ratios(
    axes: Axes, panel: _Panel, peers: Sequence[str], ends: tuple[float, float]
) -> None:
    """Draw ours / peer from 1, on a logarithmic axis, with the interval."""
    _prepare(axes, panel.rows, with_names=False)
    axes.set_xscale("log", base=2)
    low, high = ends
    own = panel.peers
    thickness = 0.8 / max(1, len(own))
    for place, row in enumerate(panel.rows):
        for index, peer in enumerate(own):
            cell = row.beside(peer)
            if cell is not None:
                offset = (index - (len(own) - 1) / 2) * thickness
                colour = _PEERS[peers.index(peer) % len(_PEERS)]
                _draw_ratio(axes, cell, place + offset, 0.85 * thickness, colour)
    axes.axvline(1, color=_INK, linewidth=1)
    axes.set_xlim(low, high)
    ticks = [2.0**power for power in range(math.ceil(math.log2(low)), int(math.log2(high)) + 1)]
    axes.set_xticks(ticks, [f"{tick:g}x" if tick >= 1 else f"1/{1 / tick:g}x" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("time / peer's time: left of 1x is faster than the peer", fontsize=7)


def _draw_ratio(axes: Axes, cell: Cell, place: float, thickness: float, colour: str) -> None:
    if cell.ratio is None or cell.ratio_interval is None:
        return
    low, high = cell.ratio_interval
    axes.barh(place, cell.ratio - 1, left=1, height=thickness, color=colour)
    axes.plot((low, high), (place, place), color=_INK, linewidth=0.9)
    outer = max(high, 1.0) if cell.ratio >= 1 else min(low, 1.0)
    axes.text(
        outer * (1.06 if cell.ratio >= 1 else 1 / 1.06),
        place,
        ratio_words(cell.ratio),
        va="center_baseline",
        ha="left" if cell.ratio >= 1 else "right",
        fontsize=6,
    )


def _ratio_range(cells: Sequence[Cell]) -> tuple[float, float]:
    """Return the ends of the axis: room for every interval and for the numbers beside them."""
    ends = [end for cell in cells for end in cell.ratio_interval or ()]
    return min([0.5, *ends]) / 1.5, max([2.0, *ends]) * 1.5


def _draw_head(
    figure: Figure,
    results: Results,
    notes: Sequence[str],
    peers: Sequence[str],
    total: float,
) -> None:
    """Write what was measured where, and the key to the colours."""
    place, _, rest = headline(results).partition(", attn ")
    figure.text(0.02, 1 - 0.28 / total, place, fontsize=11, fontweight="bold")
    figure.text(0.02, 1 - 0.48 / total, f"attn {rest}", fontsize=8)
    for index, line in enumerate(notes):
        figure.text(0.02, 1 - (0.66 + 0.16 * index) / total, line, fontsize=7)
    entries = [("read limit (GB/s)", _READ), ("matrix product limit (FLOP/s)", _MATMUL)]
    entries += [(f"beside {peer}", _PEERS[index % len(_PEERS)]) for index, peer in enumerate(peers)]
    _draw_key(figure, entries, 1 - (0.75 + 0.16 * len(notes)) / total)


def _draw_key(figure: Figure, entries: Sequence[tuple[str, str]], height: float) -> None:
    from matplotlib.patches import Patch

    handles: list[Any] = [Patch(color=colour, label=words) for words, colour in entries]
    figure.legend(
        handles=handles,
        loc="center left",
        bbox_to_anchor=(0.01, height),
        ncols=len(entries),
        frameon=False,
        fontsize=7.5,
        handlelength=1.0,
        columnspacing=1.4,
    )
