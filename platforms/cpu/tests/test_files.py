"""Small files of /proc and /sys."""

from __future__ import annotations

from pathlib import Path

import pytest

from attn_cpu.files import parse_cpu_list, read_number, read_text


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("0", (0,)), ("0-3", (0, 1, 2, 3)), ("0-1,4,6-7", (0, 1, 4, 6, 7)), ("", ()), ("0-,x", (0,))],
)
def test_cpu_lists(text: str, cpus: tuple[int, ...]) -> None:
    assert parse_cpu_list(text) == cpus


def test_a_file_that_is_not_there_or_holds_words_is_none(tmp_path: Path) -> None:
    (tmp_path / "words").write_text("max\n")
    (tmp_path / "number").write_text("-1\n")
    assert read_text(tmp_path / "absent") is None
    assert read_text(tmp_path) is None
    assert read_text(tmp_path / "words") == "max"
    assert read_number(tmp_path / "words") is None
    assert read_number(tmp_path / "number") == -1
