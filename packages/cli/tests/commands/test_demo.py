from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from attn_shared.errors import NoBackendError


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The demo replaced by a recorder that returns 1."""
    seen: list[dict[str, Any]] = []

    def main(**options: Any) -> int:
        seen.append(options)
        if options["backend"] == "NONE":
            raise NoBackendError("nothing serves the model.")
        if options["as_json"]:
            sys.stdout.write('{"tokens": []}\n')
        return 1

    demo = types.ModuleType("attn_transformers.demo")
    demo.main = main  # type: ignore[attr-defined]
    package = types.ModuleType("attn_transformers")
    package.demo = demo  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "attn_transformers", package)
    monkeypatch.setitem(sys.modules, "attn_transformers.demo", demo)
    return seen


def test_options_reach_the_demo_and_its_code_comes_back(attn: Any, calls: list[Any]) -> None:
    words = ("--prompt", "Hi", "--max-new-tokens", "3", "--backend", "TORCH_SDPA", "--quiet")
    assert attn("demo", *words).exit_code == 1
    (options,) = calls
    console = options.pop("console")
    assert options == {
        "prompt": "Hi",
        "max_new_tokens": 3,
        "backend": "TORCH_SDPA",
        "device": "cpu",
        "dtype": "float32",
        "as_json": False,
        "quiet": True,
    }
    assert console.stderr is False


def test_with_json_the_console_leaves_stdout_alone(attn: Any, calls: list[Any]) -> None:
    attn("demo", "--json")
    assert calls[0]["console"].stderr is True


def test_a_file_holds_the_json_that_the_demo_prints(
    attn: Any, calls: list[Any], tmp_path: Path
) -> None:
    path = tmp_path / "demo.json"
    result = attn("demo", "--json", "--output", str(path))
    assert (result.exit_code, result.stdout) == (1, '{"tokens": []}\n')
    assert path.read_text() == result.stdout


def test_a_file_without_json_is_refused_before_the_model_runs(
    attn: Any, calls: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the error's own JSON goes to the file that was named
    result = attn("demo", "--output", "demo.json")
    assert (result.exit_code, calls) == (2, [])
    assert "--output is 'demo.json' without --json" in result.stderr


def test_an_error_of_the_demo_is_reported(attn: Any, calls: list[Any]) -> None:
    answer = attn.json("demo", "--backend", "NONE", code=3)
    assert answer["error"]["message"] == "nothing serves the model."


@pytest.mark.parametrize("missing", ["attn_transformers", "transformers"])
def test_a_package_that_is_missing_comes_with_the_command(
    attn: Any, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.delitem(sys.modules, "attn_transformers.demo", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Missing(missing), *sys.meta_path])
    monkeypatch.delitem(sys.modules, "attn_transformers", raising=False)
    result = attn("demo")
    assert (result.exit_code, result.stdout) == (4, "")
    assert f"attn demo needs {missing}, which is not installed" in result.stderr
    assert (
        "in a checkout of attn, run: pip install './packages/transformers[demo]'" in result.stderr
    )


class Missing:
    """Makes a package look as if it were not installed."""

    def __init__(self, name: str) -> None:
        self.name = name

    def find_spec(self, name: str, _path: object, _target: object = None) -> None:
        if name == self.name or (self.name == "transformers" and name == "attn_transformers.demo"):
            raise ModuleNotFoundError(f"No module named {self.name!r}", name=self.name)
