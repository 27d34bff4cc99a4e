"""The example of a decode over ranks, as the one rank that it is without torchrun."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "decode_over_ranks.py"
SMALL = ["--context=100", "--batch=2", "--steps=2", "--heads=4", "--kv-heads=2", "--head-size=16"]


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location(EXAMPLE.stem, EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_one_rank_prints_and_writes_its_row(
    example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "row.json"
    assert example.main([*SMALL, "--json", str(path)]) == 0
    row = json.loads(path.read_text())
    assert (row["ranks"], row["context"], row["batch"], row["combine"]) == (1, 100, 2, None)
    assert row["bytes that a rank sends per step"] == 0
    assert row["largest difference from one rank alone"] == 0
    # Two sequences of 102 tokens are 7 blocks of 16 each; an entry is 2 * 2 * 16 float32.
    assert row["cache of a rank, MiB"] == round(2 * 7 * 16 * 2 * 2 * 16 * 4 / 2**20, 1)
    assert "median step, ms" in capsys.readouterr().out
