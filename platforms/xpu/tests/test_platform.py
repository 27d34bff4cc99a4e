"""The XPU platform: availability with every reason, devices, candidates, purity, forks."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from attn_shared.device import DeviceCapability, DeviceFacts, Fp8Format, Vendor
from attn_shared.errors import InvalidInputError
from attn_shared.inventory import scan
from attn_shared.request import AttentionRequest, Phase
from attn_shared.torch_build import TorchBuild
from attn_xpu.platform import XpuPlatform

WriteCards = Callable[..., Path]

XPU_BUILD = TorchBuild(version="2.14.0+xpu", xpu="20260101")
B60 = (0xE211, "xe", 1)


def platform(
    root: Path,
    *,
    build: TorchBuild = XPU_BUILD,
    environ: Mapping[str, str] | None = None,
    loader: str | None = None,
    running: tuple[DeviceFacts, ...] | None = None,
) -> XpuPlatform:
    return XpuPlatform(
        torch_build=build,
        environ=environ or {},
        sysfs=root / "sys",
        device_folder=root / "dev",
        loader_problem=lambda: loader,
        torch_devices=lambda: running,
    )


def request(phase: Phase = Phase.MIXED) -> AttentionRequest:
    return AttentionRequest(num_heads=8, num_kv_heads=2, head_size=64, phase=phase)


def simulated(arch: str) -> DeviceFacts:
    return DeviceFacts(
        vendor=Vendor.INTEL,
        name=arch,
        arch=arch,
        capability=None,
        arch_family="any",
        fp8=Fp8Format.NONE,
        is_simulated=True,
    )


def test_available_with_what_is_there(write_cards: WriteCards) -> None:
    here = platform(write_cards(B60, B60))
    found = here.availability()
    assert found.is_available
    assert found.reason.startswith("2 x Intel Arc Pro B60 (bmg); from the kernel (sysfs)")
    assert not here.supports_fp8()
    assert not here.has_device_capability(8, 0)


def test_a_cpu_torch_cannot_use_the_gpu_but_its_facts_are_shown(write_cards: WriteCards) -> None:
    here = platform(write_cards(B60), build=TorchBuild(version="2.13.0+cpu"))
    found = here.availability()
    assert not found.is_available
    assert "built without XPU: install torch's XPU build" in found.reason
    assert "the kernel shows 1 x Intel Arc Pro B60 (bmg)" in found.reason
    assert here.device().arch == "bmg"


def test_a_missing_loader_is_told(write_cards: WriteCards) -> None:
    found = platform(write_cards(B60), loader="the loader is missing").availability()
    assert not found.is_available
    assert found.reason.startswith("the loader is missing; the kernel shows 1 x Intel")


def test_without_an_intel_gpu_the_loader_is_not_asked_for(tmp_path: Path) -> None:
    (tmp_path / "sys/class/drm").mkdir(parents=True)
    reason = platform(tmp_path, loader="the loader is missing").availability().reason
    assert reason.startswith("no Intel GPU: no graphics driver (xe or i915)")
    assert "loader" not in reason


def test_a_system_without_sysfs_says_what_to_call(tmp_path: Path) -> None:
    assert "call torch.xpu.init() first" in platform(tmp_path).availability().reason


def test_a_missing_device_node_is_told(write_cards: WriteCards) -> None:
    root = write_cards(B60)
    (root / "dev/dri/renderD128").unlink()
    reason = platform(root).availability().reason
    assert f"{root / 'dev/dri/renderD128'} is not there" in reason


def test_a_device_node_that_may_not_be_opened_is_told(
    write_cards: WriteCards, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write_cards(B60)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert "may not be opened by this user: join its group" in platform(root).availability().reason


def test_hidden_gpus_are_told_with_the_mask(write_cards: WriteCards) -> None:
    here = platform(write_cards(B60), environ={"ZE_AFFINITY_MASK": "4"})
    assert here.devices() == ()
    reason = here.availability().reason
    assert "ZE_AFFINITY_MASK='4' hides all Intel GPUs ('4' names no device" in reason


def test_a_change_of_the_mask_is_followed(write_cards: WriteCards) -> None:
    environ: dict[str, str] = {}
    root = write_cards(B60, B60)
    here = XpuPlatform(
        torch_build=XPU_BUILD,
        environ=environ,
        sysfs=root / "sys",
        device_folder=root / "dev",
        loader_problem=lambda: None,
        torch_devices=lambda: None,
    )
    assert len(here.devices()) == 2
    environ["ZE_AFFINITY_MASK"] = "1"
    assert len(here.devices()) == 1


def test_once_torch_runs_xpu_its_list_counts(tmp_path: Path) -> None:
    here = platform(tmp_path, running=(simulated("pvc"),))
    assert [device.arch for device in here.devices()] == ["pvc"]
    assert here.availability().is_available


def test_versions_are_those_of_driver_runtime_and_torch(write_cards: WriteCards) -> None:
    root = write_cards(B60, (0x0BD5, "i915", 1))
    (root / "sys/module/i915").mkdir(parents=True)
    (root / "sys/module/i915/version").write_text("1.25.2\n")
    here = XpuPlatform(
        torch_build=XPU_BUILD,
        environ={},
        sysfs=root / "sys",
        device_folder=root / "dev",
        runtime_version=lambda: "1.14.37020",
    )
    assert here.versions() == {
        "graphics driver": "i915 1.25.2, xe",
        "compute runtime": "1.14.37020",
        "SYCL of torch": "20260101",
    }


def test_unknown_versions_are_left_out(tmp_path: Path) -> None:
    assert platform(tmp_path, build=TorchBuild(version="2.13.0+cpu")).versions() == {}


@pytest.mark.parametrize("phase", list(Phase))
def test_candidates_of_devices_that_are_not_here(phase: Phase) -> None:
    found = XpuPlatform().candidates(request(phase), simulated("pvc"))
    assert [candidate.name for candidate in found] == [
        "XPU_FLASH_ATTN",
        "TRITON_ATTN",
        "IPEX",
        "TORCH_SDPA",
        "FLEX_ATTENTION",
    ]


def test_dtypes() -> None:
    dtypes = XpuPlatform().supported_dtypes(simulated("bmg"))
    assert dtypes == (torch.bfloat16, torch.float16, torch.float32)


def test_a_device_of_another_vendor_is_refused() -> None:
    gpu = DeviceFacts(
        vendor=Vendor.NVIDIA,
        name="NVIDIA H200",
        arch="sm_90",
        capability=DeviceCapability(vendor=Vendor.NVIDIA, major=9, minor=0),
        arch_family="hopper",
        fp8=Fp8Format.E4M3FN,
    )
    with pytest.raises(InvalidInputError, match="vendor nvidia; allowed: a device of vendor intel"):
        XpuPlatform().candidates(request(), gpu)
    with pytest.raises(InvalidInputError, match="a device of vendor intel"):
        XpuPlatform().supported_dtypes(gpu)


def test_this_machine_is_described_either_way() -> None:
    found = XpuPlatform().availability()
    assert found.reason
    if TorchBuild.current().xpu is None:
        assert not found.is_available
        assert "without XPU" in found.reason or "not XPU" in found.reason


def test_importing_the_platform_loads_no_vendor_module_and_no_runtime() -> None:
    code = (
        "import sys, torch\n"
        "import attn_xpu.platform\n"
        "from attn_shared.inventory import scan\n"
        "platform = attn_xpu.platform.XpuPlatform()\n"
        "scan(platform.vendor_specs()), platform.availability()\n"
        "vendors = ('vllm_xpu_kernels', 'intel_extension_for_pytorch', 'triton')\n"
        "print([name for name in sys.modules if name.split('.')[0] in vendors])\n"
        "print(torch.xpu.is_initialized())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["[]", "False"]


def test_vendor_libraries_are_declared() -> None:
    specs = XpuPlatform().vendor_specs()
    assert [spec.name for spec in specs] == ["vllm_xpu_kernels", "ipex", "triton"]
    assert len(scan(specs).entries) == 3


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_a_forked_child_can_ask_after_its_parent_did(write_cards: WriteCards) -> None:
    here = platform(write_cards(B60))
    assert len(here.devices()) == 1
    context = multiprocessing.get_context("fork")
    child = context.Process(target=lambda: sys.exit(3 if len(here.devices()) == 1 else 1))
    child.start()
    child.join(60)
    assert child.exitcode == 3


SMOKE = """
import json, torch
from attn_xpu.platform import XpuPlatform

def facts(platform):
    return [[d.arch, d.index] for d in platform.devices()]

before = XpuPlatform()
assert before.availability().is_available, before.availability().reason
asked = facts(before)
assert not torch.xpu.is_initialized()
torch.xpu.init()
print(json.dumps({"before": asked, "after": facts(before)}))
"""


@pytest.mark.xpu
def test_facts_agree_with_torchs_on_the_hardware() -> None:
    command = [sys.executable, "-c", SMOKE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["before"]
    assert [arch for arch, _ in told["before"]] == [arch for arch, _ in told["after"]]
    numbered = [pair for pair in told["before"] if pair[1] is not None]
    assert all(pair in told["after"] for pair in numbered)
