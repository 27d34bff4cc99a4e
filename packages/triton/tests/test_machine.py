"""Devices as the kernels see them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from attn_triton import machine
from attn_triton.machine import machine_of


def test_a_cpu_stands_for_the_interpreter() -> None:
    found = machine_of(torch.device("cpu"))
    assert (found.arch.canonical, found.compute_units) == ("sm_90", 4)


def test_gpus_by_their_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = {
        1: SimpleNamespace(major=9, minor=0, multi_processor_count=132, gcnArchName=""),
        2: SimpleNamespace(
            major=9, minor=4, multi_processor_count=304, gcnArchName="gfx942:sramecc+:xnack-"
        ),
    }
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpus[device.index])
    monkeypatch.setattr(torch.version, "hip", None)
    machine.machine_of.cache_clear()
    hopper = machine_of(torch.device("cuda", 1))
    assert (hopper.arch.canonical, hopper.compute_units) == ("sm_90", 132)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert machine_of(torch.device("cuda", 2)).arch.family == "cdna3"
    machine.machine_of.cache_clear()


def test_an_intel_gpu_has_xe_cores_of_eight_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(gpu_eu_count=160)
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda device: properties)
    machine.machine_of.cache_clear()
    assert machine_of(torch.device("xpu", 0)).compute_units == 20
    machine.machine_of.cache_clear()
