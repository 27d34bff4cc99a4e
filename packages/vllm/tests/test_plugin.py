from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points

import pytest
from vllm_stand_in import StandIn

from attn_shared.errors import UnknownNameError, UnsupportedOptionError
from attn_vllm import register
from attn_vllm._vendor.engine import CLASS_PATH

CPU = ("0.32.0+cpu", "cpu")


def stand_in(monkeypatch: pytest.MonkeyPatch, version: str, device: str) -> StandIn:
    found = StandIn(version, device)
    found.install(monkeypatch)
    return found


def test_vllm_finds_the_plugin() -> None:
    (found,) = (each for each in entry_points(group="vllm.general_plugins") if each.name == "attn")
    assert found.load() is register


def test_unset_leaves_vllm_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATTN_VLLM_BACKEND", raising=False)
    engine = stand_in(monkeypatch, "9.9", "cpu")  # not even its release is looked at
    register()
    assert set(engine.names.values()) == {None}


@pytest.mark.parametrize(
    ("version", "device", "name"),
    [
        ("0.25.1", "cpu", "CPU_ATTN"),
        ("0.32.0+cpu", "cpu", "CPU_ATTN"),
        ("0.25.1", "cuda", "CUSTOM"),
        ("0.32.0", "cuda", "ATTN"),
        ("0.33.0", "xpu", "ATTN"),
    ],
)
def test_it_takes_the_place_that_the_release_has_for_it(
    monkeypatch: pytest.MonkeyPatch, version: str, device: str, name: str
) -> None:
    monkeypatch.setenv("ATTN_VLLM_BACKEND", "auto")
    engine = stand_in(monkeypatch, version, device)
    register()
    register()  # every process loads plugins, some of them twice
    assert {key: path for key, path in engine.names.items() if path} == {name: CLASS_PATH}


def test_another_release_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTN_VLLM_BACKEND", "auto")
    engine = stand_in(monkeypatch, "0.29.0", "cpu")
    with pytest.raises(UnsupportedOptionError, match=r"0\.29\.0"):
        register()
    assert set(engine.names.values()) == {None}


def test_a_name_that_nobody_has_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTN_VLLM_BACKEND", "TORCH_SPDA")
    engine = stand_in(monkeypatch, *CPU)
    with pytest.raises(UnknownNameError, match="TORCH_SDPA"):
        register()
    assert set(engine.names.values()) == {None}


def test_importing_it_imports_no_vllm() -> None:
    code = "import sys, attn_vllm, attn_vllm.adapters; sys.exit('vllm' in sys.modules)"
    assert subprocess.call([sys.executable, "-c", code]) == 0
