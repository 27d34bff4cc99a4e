"""What docs/ holds of the generated is current, and its generators work."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.torch_version import TorchVersion

CI = Path(__file__).resolve().parents[1] / "ci"


def script(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(CI))
    return importlib.import_module(name)


@pytest.mark.skipif(
    TorchVersion(torch.__version__) < "2.9",
    reason="FLEX_ATTENTION serves Intel GPUs from torch 2.9 on, as docs/ says",
)
def test_the_support_matrix_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    stale = list(script("generate_matrix", monkeypatch).stale())
    assert not stale, "\n".join(stale)


def test_a_stale_matrix_is_told_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    generate = script("generate_matrix", monkeypatch)
    texts = {"support-matrix.md": "new\n", "support-matrix.html": "page\n"}
    monkeypatch.setattr(generate, "DOCS", tmp_path)
    monkeypatch.setattr(generate, "pages", lambda: texts)
    (tmp_path / "support-matrix.md").write_text("old\n")
    assert generate.main(["--check"]) == 1
    said = capsys.readouterr().out
    assert "docs/support-matrix.md is not current; run: python ci/generate_matrix.py" in said
    assert "-old\n+new" in said
    assert "docs/support-matrix.html is not current" in said
    assert generate.main([]) == 0
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == texts
    assert generate.main(["--check"]) == 0


def report(**changes: Any) -> str:
    facts = {
        "backend": "TORCH_SDPA",
        "source": "attn-torch 0.1.0",
        "device": "cuda: NVIDIA H200 (sm_90)",
        "isa": "",
        "torch": "2.11.0",
        "python": "3.12.1",
        "depth": "quick",
    }
    total = {"passed": 30, "failed": 0, "expected": 0, "excluded": 9}
    return json.dumps({"ok": True, "facts": facts, "total": total, "problems": [], **changes})


def test_a_report_is_put_on_record_by_one_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record_run = script("record_run", monkeypatch)
    given, runs = tmp_path / "report.json", tmp_path / "runs.json"
    given.write_text(report())
    runs.write_text('{"schema_version": 1, "runs": []}')
    words = [str(given), "--record", "a drawer", "--date", "2026-02-03"]
    assert record_run.main(words, runs=runs) == 0
    assert "TORCH_SDPA on NVIDIA H200 (sm_90), 2026-02-03" in capsys.readouterr().out
    (run,) = json.loads(runs.read_text())["runs"]
    assert (run["backend"], run["arch"], run["passed"]) == ("TORCH_SDPA", "sm_90", 30)
    assert (run["record"], run["date"]) == ("a drawer", "2026-02-03")


@pytest.mark.parametrize("text", [report(ok=False), "no JSON", "{}"])
def test_what_is_no_passed_run_is_not_put_on_record(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record_run = script("record_run", monkeypatch)
    given, runs = tmp_path / "report.json", tmp_path / "runs.json"
    given.write_text(text)
    runs.write_text('{"schema_version": 1, "runs": []}')
    before = runs.read_text()
    assert record_run.main([str(given), "--record", "a drawer"], runs=runs) == 2
    assert str(given) in capsys.readouterr().err
    assert runs.read_text() == before
