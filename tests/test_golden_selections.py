"""What is selected for well-known models on every preset is what the golden files say."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from attn_shared.device import PRESETS

CI = Path(__file__).parents[1] / "ci"


@pytest.fixture
def golden() -> Iterator[Any]:
    sys.path.insert(0, str(CI))
    yield importlib.import_module("generate_golden")
    sys.path.remove(str(CI))
    for name in ("generate_golden", "repository"):
        sys.modules.pop(name, None)


def test_the_golden_selections_are_current(golden: Any) -> None:
    told = list(golden.stale())
    assert not told, "\n".join(told)


def test_every_preset_and_at_least_a_dozen_models_are_in_them(golden: Any) -> None:
    files = sorted(golden.GOLDEN.glob("*.txt"))
    assert len(files) >= 12
    for path in files:
        lines = path.read_text(encoding="utf-8").splitlines()
        table = lines[lines.index(next(line for line in lines if line.startswith("preset"))) + 1 :]
        assert [line.split()[0] for line in table] == list(PRESETS), path.name
        assert max(map(len, lines)) <= 120, path.name


def test_a_stale_file_is_told_written_and_one_too_many_removed(
    golden: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(golden, "GOLDEN", tmp_path)
    monkeypatch.setattr(golden, "texts", lambda: {"llama.txt": "new\n"})
    chooser = tmp_path / "choosing.md"
    chooser.write_text(f"before\n{golden.BEGIN}\nold\n{golden.END}\nafter\n")
    monkeypatch.setattr(golden, "PAGE", chooser)
    (tmp_path / "llama.txt").write_text("old\n")
    (tmp_path / "gone.txt").write_text("left over\n")
    assert golden.main(["--check"]) == 1
    said = capsys.readouterr().out
    assert "llama.txt is not current; run: python ci/generate_golden.py" in said
    assert "-old\n+new" in said
    assert "gone.txt is not current" in said
    assert golden.main([]) == 0
    assert {path.name: path.read_text() for path in tmp_path.glob("*.txt")} == {
        "llama.txt": "new\n"
    }
    text = chooser.read_text()
    assert text.startswith(f"before\n{golden.BEGIN}\n\n| presets | llama-3-8b |")
    assert text.endswith(f"|\n\n{golden.END}\nafter\n")
    assert "\nold\n" not in text
    assert golden.main(["--check"]) == 0
