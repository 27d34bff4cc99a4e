"""What all tables share: columns that wrap but never cut a name, and colours of a status."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from rich import box
from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

__all__ = ["column_table", "failures_block", "indented", "notes_block", "section", "status_text"]

_STYLES = {
    "chosen": "bold green",
    "eligible": "green",
    "rejected": "yellow",
    "unavailable": "red",
    "unknown": "magenta",
    "available": "green",
    "provided": "green",
    "present": "green",
    "loaded": "bold green",
    "broken": "bold red",
    "failed": "bold red",
}


def status_text(status: str) -> Text:
    """Return a status in its colour."""
    return Text(status, style=_STYLES.get(status, "dim"))


def column_table(
    names: Sequence[str], rows: Iterable[Sequence[RenderableType]], *, is_airy: bool = False
) -> Table:
    """Return a table whose last column takes the room that is left, and wraps.

    Args:
        names: headings.
        rows: cells; a string is taken literally.
        is_airy: leave a blank line between rows.
    """
    table = Table(
        box=box.SIMPLE_HEAD,
        header_style="bold",
        pad_edge=False,
        show_edge=False,
        leading=int(is_airy),
    )
    for name in names[:-1]:
        table.add_column(name, no_wrap=True)
    table.add_column(names[-1], overflow="fold", ratio=1)
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return table


def indented(text: Text) -> Padding:
    """Return a text two columns to the right, its wrapped lines too."""
    return Padding(text, (0, 0, 0, 2))


def section(title: str) -> Text:
    """Return the heading of a table."""
    return Text(f"\n{title}", style="bold")


def notes_block(notes: Iterable[str]) -> Table:
    """Return a line for each note, wrapped beside its mark."""
    grid = Table.grid(padding=(0, 1))
    for note in notes:
        grid.add_row(Text("note:", style="dim"), Text(note))
    return grid


def failures_block(failures: Iterable[Mapping[str, str]]) -> Iterator[Text]:
    """Return plugins that could not be used, each in its own words; nothing if there are none."""
    found = list(failures)
    if not found:
        return
    yield section("Plugins that failed to load (each disables itself only)")
    for failure in found:
        source = f"{failure['distribution']} {failure['version']}".strip()
        yield Text.assemble((failure["entry_point"], "bold red"), f" of {source}")
        yield Text(f"  {failure['error']}")
