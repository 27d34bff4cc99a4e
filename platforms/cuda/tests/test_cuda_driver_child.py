"""The script that asks the CUDA driver, with a stand-in for the C library."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from typing import Any

import pytest

from attn_cuda._vendor import cuda_driver_child

IDENTIFIER = uuid.UUID("12345678-9abc-def0-1234-56789abcdef0")


class FakeCuda:
    """C functions of the driver; `fails` names one that returns an error."""

    def __init__(self, fails: str = "") -> None:
        self.fails = fails

    def __getattr__(self, name: str) -> Callable[..., int]:
        if name == self.fails:
            return lambda *arguments: 100
        return {
            "cuInit": lambda flags: 0,
            "cuDriverGetVersion": lambda value: _write(value, 13000),
            "cuDeviceGetCount": lambda value: _write(value, 2),
            "cuDeviceGet": lambda device, index: _write(device, index.value),
            "cuDeviceGetName": lambda buffer, length, device: _fill(buffer, b"NVIDIA H200"),
            "cuDeviceGetPCIBusId": lambda buffer, length, device: _fill(buffer, b"0000:18:00.0"),
            "cuDeviceGetUuid": lambda buffer, device: _raw(buffer, IDENTIFIER.bytes),
            "cuDeviceTotalMem_v2": lambda value, device: _write(value, 2**37),
            "cuDeviceGetAttribute": lambda value, number, device: _write(
                value, {16: 132, 75: 9, 76: 0}[number.value]
            ),
            "cuGetErrorString": lambda status, text: _write(text, b"no device is detected"),
        }[name]


def _write(reference: Any, value: object) -> int:
    reference._obj.value = value
    return 0


def _fill(buffer: Any, value: bytes) -> int:
    buffer.value = value
    return 0


def _raw(buffer: Any, value: bytes) -> int:
    buffer.raw = value
    return 0


def test_devices_are_printed_as_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cuda_driver_child, "_load", FakeCuda)
    assert cuda_driver_child.main() == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["cuda_version"] == 13000
    assert answer["devices"] == 2 * [
        {
            "uuid": "GPU-12345678-9abc-def0-1234-56789abcdef0",
            "name": "NVIDIA H200",
            "capability": [9, 0],
            "memory_bytes": 2**37,
            "compute_units": 132,
            "pci_bus_id": "0000:18:00.0",
        }
    ]


def test_an_error_is_printed_with_the_drivers_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cuda_driver_child, "_load", lambda: FakeCuda(fails="cuInit"))
    assert cuda_driver_child.main() == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer == {"error": "cuInit: no device is detected (CUDA error 100)"}


def test_a_missing_driver_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load() -> None:
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(cuda_driver_child, "_load", load)
    assert cuda_driver_child.main() == 1
    assert "libcuda.so.1" in json.loads(capsys.readouterr().out)["error"]
