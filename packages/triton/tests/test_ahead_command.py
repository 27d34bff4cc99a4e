"""What the command that compiles ahead says to wrong input: a line, never a traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

from attn_triton.ahead import main


def test_input_that_cannot_be_taken_is_told_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "kernels.jsonl"
    assert main([str(path), "--arch", "sm_90"]) == 2
    assert capsys.readouterr().err.startswith("Error: FileNotFoundError")
    path.write_text("{}\n", encoding="utf-8")
    assert main([str(path), "--arch", "sm_90", "--jobs", "0"]) == 2
    assert "jobs is 0; allowed: at least 1" in capsys.readouterr().err


def test_a_line_that_is_no_kernel_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "kernels.jsonl"
    path.write_text('{"no": "kernel"}\n', encoding="utf-8")
    assert main([str(path), "--arch", "sm_90", "--jobs", "1"]) == 1
    said = capsys.readouterr().out
    assert said.startswith("0 of 1 kernels")
    assert """line '{"no": "kernel"}' for sm_90: """ in said
