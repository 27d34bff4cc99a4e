"""Reading what the child process prints, and the child itself where there is no driver."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from attn_cuda._vendor import cuda_driver
from attn_cuda._vendor.cuda_driver import ask_driver, parse_answer
from attn_cuda._vendor.nvml import DriverUnavailableError

DEVICE = {
    "uuid": "GPU-11111111-0000-0000-0000-000000000000",
    "name": "NVIDIA H200",
    "capability": [9, 0],
    "memory_bytes": 150_110_011_392,
    "compute_units": 132,
    "pci_bus_id": "0000:18:00.0",
}


def test_an_answer_is_read() -> None:
    reading = parse_answer(json.dumps({"cuda_version": 12080, "devices": [DEVICE]}), "", 0)
    assert reading.cuda_version == (12, 8)
    assert "child process" in reading.source
    (gpu,) = reading.gpus
    assert (gpu.name, gpu.capability, gpu.compute_units) == ("NVIDIA H200", (9, 0), 132)
    assert gpu.uuid == DEVICE["uuid"]


def test_the_drivers_own_words_are_kept() -> None:
    text = json.dumps({"error": "cuInit: no CUDA-capable device is detected (CUDA error 100)"})
    with pytest.raises(DriverUnavailableError, match=r"no CUDA-capable device .*error 100"):
        parse_answer(text, "", 1)


def test_a_child_that_crashed_is_told_with_its_status() -> None:
    with pytest.raises(DriverUnavailableError, match=r"exit status -11: Fatal error"):
        parse_answer("", "Python\nFatal error\n", -11)


def test_the_child_gets_the_environment_and_prints_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = tmp_path / "child.py"
    child.write_text(
        "import json, os\n"
        f"device = {DEVICE!r}\n"
        "device['name'] = os.environ['CUDA_VISIBLE_DEVICES']\n"
        "print(json.dumps({'cuda_version': 13000, 'devices': [device]}))\n"
    )
    monkeypatch.setattr(cuda_driver, "_CHILD", child)
    reading = ask_driver({**os.environ, "CUDA_VISIBLE_DEVICES": "7"})
    assert reading.gpus[0].name == "7"


def test_a_child_that_cannot_be_started_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver.sys, "executable", "/no/such/python")
    with pytest.raises(DriverUnavailableError, match="could not be asked"):
        ask_driver(dict(os.environ))
