"""The build backend: when kernels are built, when not, and that nobody is left guessing."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

pytest.importorskip("scikit_build_core")

import attn_cpu_build
import find_torch as torch_finder


@pytest.fixture
def compiler(tmp_path: Path) -> dict[str, str]:
    """An environment with something that looks like a compiler."""
    program = tmp_path / "c++"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    return {"CXX": str(program)}


def test_they_are_built_where_all_is_there(compiler: dict[str, str]) -> None:
    assert attn_cpu_build.why_not(compiler) is None


def test_off_is_off(compiler: dict[str, str]) -> None:
    assert attn_cpu_build.why_not(compiler | {"ATTN_CPU_KERNELS": "off"}) == "ATTN_CPU_KERNELS=off"


def test_no_compiler_is_a_reason_or_an_error() -> None:
    missing = {"CXX": "/no/such/compiler"}
    assert "no C++ compiler was found (/no/such" in (attn_cpu_build.why_not(missing) or "")
    with pytest.raises(SystemExit, match=r"ATTN_CPU_KERNELS=required, and no C\+\+ compiler"):
        attn_cpu_build.why_not(missing | {"ATTN_CPU_KERNELS": "required"})


@pytest.mark.parametrize(("version", "words"), [("2.9.1", "older than 2.10"), (None, "not inst")])
def test_no_torch_is_a_reason(
    compiler: dict[str, str], monkeypatch: pytest.MonkeyPatch, version: str | None, words: str
) -> None:
    if version is None:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    reason = attn_cpu_build.why_not(compiler) or ""
    assert words in reason
    assert "--no-build-isolation" in reason


def test_another_word_is_refused() -> None:
    with pytest.raises(SystemExit, match="ATTN_CPU_KERNELS='yes' is not allowed; allowed: auto"):
        attn_cpu_build.why_not({"ATTN_CPU_KERNELS": "yes"})


def test_cmake_is_left_out_of_a_pure_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTN_CPU_KERNELS", "off")
    assert attn_cpu_build._settled(None) == {"wheel.cmake": "false"}
    assert attn_cpu_build._settled({"wheel.cmake": "true"}) == {"wheel.cmake": "true"}


def test_find_torch_prints_a_list_for_cmake(capsys: pytest.CaptureFixture[str]) -> None:
    assert torch_finder.main() == 0
    root, version = capsys.readouterr().out.strip().split(";")
    assert (Path(root) / "include" / "torch").is_dir()
    assert version == importlib.metadata.version("torch")


def test_find_torch_says_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.8.0")
    assert torch_finder.main() == 1
    assert "torch 2.8.0 is older than 2.10" in capsys.readouterr().err
