"""The checks of the lint session find what they are for."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from types import ModuleType

import pytest

CI = Path(__file__).resolve().parents[1] / "ci"


def check(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(CI))
    return importlib.import_module(f"check_{name}")


def function_of(lines: int, comment: str = "") -> str:
    return f"def long():{comment}\n" + "    call()\n" * (lines - 1)


@pytest.mark.parametrize(
    ("source", "failures"),
    [
        pytest.param(function_of(80), 0, id="function-at-most"),
        pytest.param(function_of(81), 1, id="function-over"),
        pytest.param(function_of(81, "  # size: one algorithm"), 0, id="function-with-reason"),
        pytest.param("call()\n" * 500, 0, id="file-at-most"),
        pytest.param("call()\n" * 501, 1, id="file-over"),
    ],
)
def test_sizes(source: str, failures: int, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = check("sizes", monkeypatch).measure(source, "module.py")
    assert sum(item.is_failure for item in measured) == failures


@pytest.mark.parametrize("folder", ["work", "root", "home/someone"])
@pytest.mark.parametrize("before", ["", "cd ", '"', "file://", "PYTHONPATH="])
def test_stray_paths_are_found(folder: str, before: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = f"fine\n{before}/{folder}/x\n"
    assert [line for line, _ in check("paths", monkeypatch).stray_paths(text)] == [2]


@pytest.mark.parametrize(
    "text", ["src/workspace/x", "~/workspace", "https://a.example/root", "/rooted/x"]
)
def test_other_paths_are_left_alone(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not list(check("paths", monkeypatch).stray_paths(text))


def test_imports_say_whether_they_are_deferred(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = ast.parse("import os.path\ndef probe():\n    from flashinfer import decode\n")
    found = list(check("modules", monkeypatch).imports(tree))
    assert sorted(found) == [(1, "os", False), (3, "flashinfer", True)]


def test_requirements_are_turned_into_import_names(monkeypatch: pytest.MonkeyPatch) -> None:
    modules_of = check("modules", monkeypatch).modules_of
    assert modules_of(["attn-cli[demo]==1", "torch>=2.8"]) == {"attn_cli", "torch"}
    assert modules_of(["amd-aiter>=0.1.7.post2.dev18"]) == {"aiter"}
