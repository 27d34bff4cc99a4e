from __future__ import annotations

import platform
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from attn_bench_testing import CPU

from attn_bench import machine
from attn_bench.machine import describe_machine, installed_versions, load_note
from attn_shared.vendor import Vendor

CUDA = torch.device("cuda")


def test_this_machine_has_no_hosts_name() -> None:
    found = describe_machine(CPU, ["shared"])
    assert found.name
    assert found.arch
    assert found.threads == torch.get_num_threads()
    assert found.notes == ("shared",)
    assert platform.node() not in repr(found)


def test_versions() -> None:
    found = installed_versions({"flash_attn_3": "3.0"})
    assert found["torch"] == torch.__version__
    assert found["python"] == platform.python_version()
    assert found["flash_attn_3"] == "3.0"


@pytest.mark.parametrize(("load", "is_noted"), [(0.9, False), (3.5, True)])
def test_other_work_is_noted(load: float, is_noted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.os, "cpu_count", lambda: 4)
    monkeypatch.setattr(machine.os, "getloadavg", lambda: (load, 0, 0), raising=False)
    assert ("load average 3.5 on" in load_note()) == is_noted
    monkeypatch.delattr(machine.os, "getloadavg")
    assert load_note() == ""


@pytest.mark.parametrize(
    ("answer", "driver"),
    [
        (SimpleNamespace(stdout="580.1\n580.1\n"), "580.1"),
        (SimpleNamespace(stdout=""), None),
        (subprocess.CalledProcessError(9, "nvidia-smi"), None),
        (OSError("gone"), None),
    ],
)
def test_nvidias_driver(
    answer: object, driver: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*arguments: object, **options: object) -> object:
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(machine.shutil, "which", lambda name: name)
    monkeypatch.setattr(machine.subprocess, "run", run)
    assert machine._driver(Vendor.NVIDIA, CUDA) == driver


def test_drivers_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.shutil, "which", lambda name: None)
    assert machine._driver(Vendor.NVIDIA, CUDA) is None
    monkeypatch.setattr(machine, "_AMD_DRIVER", tmp_path / "version")
    assert machine._driver(Vendor.AMD, CUDA) is None
    (tmp_path / "version").write_text("6.16\n")
    assert machine._driver(Vendor.AMD, CUDA) == "6.16"
    module = SimpleNamespace(
        get_device_properties=lambda device: SimpleNamespace(driver_version="1.3")
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    assert machine._driver(Vendor.INTEL, torch.device("xpu")) == "1.3"
