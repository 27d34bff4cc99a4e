from __future__ import annotations

import io

import pytest
from rich.console import Console, RenderableType
from rich.text import Text

from attn_cli.views.layout import (
    column_table,
    failures_block,
    indented,
    notes_block,
    section,
    status_text,
)

LONG_NAME = "FLASHINFER_MLA_SPARSE_SM120"


def lines(*renderables: RenderableType, width: int = 60) -> list[str]:
    console = Console(file=io.StringIO(), width=width, markup=False)
    for renderable in renderables:
        console.print(renderable)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", [50, 80, 120])
def test_names_stay_whole_and_the_last_column_wraps(width: int) -> None:
    reason = "words " * 40 + "a_single_word_that_is_longer_than_the_column_" * 3
    found = lines(column_table(("Backend", "Why"), [(LONG_NAME, reason)]), width=width)
    assert all(len(line) <= width for line in found)
    assert sum(LONG_NAME in line for line in found) == 1
    text = "".join(line[len(LONG_NAME) :] for line in found[2:]).replace(" ", "")
    assert text == reason.replace(" ", "")


def test_strings_are_taken_literally() -> None:
    found = lines(column_table(("A", "B"), [("x", "pip install tokenspeed-fa3")]))
    assert found[-1].split(maxsplit=1) == ["x", "pip install tokenspeed-fa3"]


def test_airy_tables_have_a_blank_line_between_rows() -> None:
    rows = [("a", "1"), ("b", "2")]
    assert len(lines(column_table(("A", "B"), rows, is_airy=True))) == 5
    assert len(lines(column_table(("A", "B"), rows))) == 4


def test_wrapped_lines_stay_indented() -> None:
    found = lines(indented(Text("one two three four")), width=12)
    assert [line.rstrip() for line in found] == ["  one two", "  three four"]


def test_notes_wrap_beside_their_mark() -> None:
    found = lines(notes_block(["one two three", "four"]), width=14)
    assert [line.rstrip() for line in found] == ["note: one two", "      three", "note: four"]


@pytest.mark.parametrize(("status", "style"), [("chosen", "bold green"), ("odd", "dim")])
def test_a_status_has_a_colour(status: str, style: str) -> None:
    assert (status_text(status).plain, status_text(status).style) == (status, style)


def test_failures_are_shown_only_if_there_are_any() -> None:
    assert lines(*failures_block([])) == []
    failure = {
        "entry_point": "X = x:X",
        "distribution": "x-dist",
        "version": "2.0",
        "error": "ImportError: no y",
    }
    text = "\n".join(lines(*failures_block([failure]), width=100))
    assert "X = x:X of x-dist 2.0\n  ImportError: no y" in text


def test_a_section_stands_apart() -> None:
    assert lines(section("Devices")) == ["", "Devices"]
