"""FlashInfer is told the architectures that it would start CUDA to ask for."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from attn_cuda import platform as platform_module
from attn_cuda._vendor.flashinfer_library import library
from attn_shared.device import DeviceFacts, preset

VARIABLE = "FLASHINFER_CUDA_ARCH_LIST"
MODULE = f"""
import os
told = os.environ.get("{VARIABLE}")
"""


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[DeviceFacts]:
    """What the machine has; a FlashInfer that keeps what it was told is on the path."""
    found: list[DeviceFacts] = []

    class Platform:
        def devices(self) -> tuple[DeviceFacts, ...]:
            return tuple(found)

    (tmp_path / "flashinfer.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(platform_module, "CudaPlatform", Platform)
    return found


def test_each_capability_is_told_once_and_forgotten_again(devices: list[DeviceFacts]) -> None:
    devices += [preset("h200"), preset("b200"), preset("h100")]
    module = library()
    assert module.told == "9.0 10.0"
    assert VARIABLE not in os.environ
    del devices[:]
    assert library() is module
    del sys.modules["flashinfer"]


def test_a_variable_that_is_set_counts(
    devices: list[DeviceFacts], monkeypatch: pytest.MonkeyPatch
) -> None:
    devices.append(preset("h200"))
    monkeypatch.setenv(VARIABLE, "8.0")
    assert library().told == "8.0"
    assert os.environ[VARIABLE] == "8.0"
    del sys.modules["flashinfer"]


def test_where_no_gpu_is_known_the_library_asks_itself(devices: list[DeviceFacts]) -> None:
    assert devices == []
    assert library().told is None
    del sys.modules["flashinfer"]
