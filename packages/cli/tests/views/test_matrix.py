from __future__ import annotations

import io
from dataclasses import replace

import pytest
from matrix_testing import ALL, BARE, matrix_of, run_of, without
from rich.console import Console

from attn_cli.matrix.answers import Answer, Cell
from attn_cli.matrix.survey import Matrix
from attn_cli.views.matrix import SymbolGrid, matrix_tables, symbol
from attn_shared.capability import Capability, DeviceLimit, Support
from attn_shared.device import DeviceFacts, Vendor


def lines(matrix: Matrix, width: int = 80) -> list[str]:
    file = io.StringIO()
    console = Console(file=file, width=width, markup=False, highlight=False)
    for part in matrix_tables(matrix):
        console.print(part)
    return [line.rstrip() for line in file.getvalue().splitlines()]


def symbols_under(shown: list[str], name: str, place: str) -> str:
    """The symbol of a row below a heading."""
    heading = next(line for line in shown if line.strip().startswith(f"{name} ┐"))
    row = next(line for line in shown if line.strip().startswith(place))
    return row[heading.index("┐")]


def test_headings_end_above_their_columns() -> None:
    slow = replace(without("softcap", Support.SLOW), alibi=Support.NO)
    shown = lines(matrix_of("h200", FAKE=slow))
    found = {
        name: symbols_under(shown, name, "NVIDIA h200")
        for name in ("ordinary", "MLA", "sinks", "softcap", "ALiBi", "LSE", "per-head scales")
    }
    assert found == {
        "ordinary": "○",
        "MLA": "·",
        "sinks": "○",
        "softcap": "◇",
        "ALiBi": "·",
        "LSE": "○",
        "per-head scales": "○",
    }


def test_full_symbols_are_of_hardware_that_was_tried() -> None:
    shown = lines(matrix_of("a100", "h200", FAKE=ALL, runs=[run_of("FAKE")]))
    assert symbols_under(shown, "window", "NVIDIA h200") == "●"
    assert symbols_under(shown, "window", "NVIDIA a100") == "○"


@pytest.mark.parametrize("answer", list(Answer))
def test_every_answer_has_a_symbol_of_its_own(answer: Answer) -> None:
    others = [symbol(Cell(answer=a), is_run=True).plain for a in Answer if a is not answer]
    assert symbol(Cell(answer=answer), is_run=True).plain not in others
    assert symbol(Cell(answer=answer), is_run=True).cell_len == 1


@pytest.mark.parametrize("width", [80, 160])
def test_the_tables_keep_within_the_width(width: int) -> None:
    def many(device: DeviceFacts) -> Capability:
        return without("sink") if device.arch_family in ("ada", "cdna3", "arm") else ALL

    nvidia = replace(BARE, devices=(DeviceLimit(vendor=Vendor.NVIDIA, at_least=(9, 0)),))
    shown = lines(matrix_of(FAKE=many, OTHER=nvidia), width)
    assert max(map(len, shown)) <= width
    text = " ".join(" ".join(shown).split())
    assert "no (allowed device: nvidia >= 9.0)" in text


def test_a_long_place_goes_on_in_the_next_line() -> None:
    def two(device: DeviceFacts) -> Capability:
        return without("sink") if device.arch_family in ("hopper", "cdna3", "arm") else ALL

    shown = lines(matrix_of(FAKE=two))
    first = next(i for i, line in enumerate(shown) if "NVIDIA except" in line)
    assert "○" in shown[first]
    assert "○" not in shown[first + 1]
    assert shown[first + 1].startswith("  ")


def test_formats_and_sizes_are_words() -> None:
    text = " ".join(" ".join(lines(matrix_of("h200", FAKE=BARE))).split())
    assert "NVIDIA h200: phases mixed, prefill, decode; dtypes bfloat16;" in text
    assert "head sizes 64, 128; K/V head sizes none;" in text
    assert "preferred block 16 NHD" in text


def test_problems_are_notes() -> None:
    text = " ".join(" ".join(lines(matrix_of("h200", FAKE=BARE))).split())
    assert "note: FAKE: its builder does not say" in text


def test_an_unavailable_backend_says_why() -> None:
    def broken(_device: DeviceFacts) -> Capability:
        raise RuntimeError("out of luck")

    text = " ".join(" ".join(lines(matrix_of("h200", FAKE=broken))).split())
    assert "NVIDIA h200 unavailable: its capability raised RuntimeError: out of luck" in text


def test_an_empty_grid_is_headings_alone() -> None:
    file = io.StringIO()
    Console(file=file, width=80).print(SymbolGrid(matrix=matrix_of("h200")))
    assert file.getvalue().count("┐") == 24
