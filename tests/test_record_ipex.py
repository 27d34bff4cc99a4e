"""The script that keeps how IPEX did on the real library, on made-up reports."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CI = Path(__file__).parents[1] / "ci"
FACTS = {
    "backend": "IPEX",
    "device": "a CPU",
    "torch": "2.8.0+cpu",
    "python": "3.11.2",
    "dtypes": ["float32"],
    "depth": "quick",
    "source": "built in",
    "suite": "1",
    "seconds": 3.0,
}


def report(passed: int = 4) -> dict[str, Any]:
    failed = 4 - passed
    outcome = {"rule": "causal", "case": "0", "status": "failed", "message": "far off"}
    return {
        "ok": failed == 0,
        "facts": FACTS,
        "total": {"run": 5, "passed": passed + 1, "excluded": 2},
        "rules": [
            {"rule": "causal", "passed": passed, "failed": failed, "excluded": 2},
            {"rule": "a_new_rule", "passed": 1},
        ],
        "outcomes": [outcome] * failed,
    }


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    sys.path.insert(0, str(CI))
    module = importlib.import_module("record_ipex")
    monkeypatch.setattr(module, "KEPT", tmp_path / "ipex.json")
    monkeypatch.setattr(module, "PAGE", tmp_path / "ipex.md")
    module.PAGE.write_text(f"before\n{module.BEGIN}\nold\n{module.END}\nafter\n")
    yield module
    sys.path.remove(str(CI))
    for name in ("record_ipex", "repository"):
        sys.modules.pop(name, None)


def answer(monkeypatch: pytest.MonkeyPatch, printed: str) -> None:
    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        assert command[1:5] == ["-m", "attn_cli", "verify", "IPEX"]
        return subprocess.CompletedProcess(command, 0, stdout=printed)

    monkeypatch.setattr(subprocess, "run", run)


def test_an_update_keeps_the_counts_and_fills_the_page(
    script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(monkeypatch, json.dumps(report()))
    assert script.main(["--update"]) == 0
    record = json.loads(script.KEPT.read_text())
    assert record["rules"]["causal"] == {"passed": 4, "failed": 0, "excluded": 2}
    assert record["facts"]["torch"] == "2.8.0+cpu"
    page = script.PAGE.read_text()
    assert page.startswith("before\n")
    assert page.endswith("after\n")
    assert "old" not in page
    assert "5 of 5 cases passed; 2 are not served." in page
    assert "| decode, prefill and mixed batches | 4 | 0 |" in page
    assert f"| {script.REST} | 1 | 0 |" in page


def test_a_failed_case_is_named_and_nothing_is_kept(
    script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(monkeypatch, json.dumps(report(passed=3)))
    assert script.main(["--update"]) == 1
    assert "causal[0]: far off" in capsys.readouterr().err
    assert not script.KEPT.exists()


def test_fewer_passed_cases_than_are_kept_fail(
    script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(monkeypatch, json.dumps(report()))
    assert script.main(["--update"]) == 0
    less = report()
    less["rules"][0]["passed"] = 2
    answer(monkeypatch, json.dumps(less))
    assert script.main([]) == 1
    assert "causal: 2 passed, and 4 are kept" in capsys.readouterr().err


@pytest.mark.parametrize("printed", ["attn: no backend IPEX\n", '{"ok": false, "error": "none"}'])
def test_no_report_fails(script: Any, monkeypatch: pytest.MonkeyPatch, printed: str) -> None:
    answer(monkeypatch, printed)
    assert script.main([]) == 1


def test_a_page_without_its_place_is_an_error(script: Any) -> None:
    with pytest.raises(ValueError, match="the page has no"):
        script.page_with("text", {})
