"""The ROCm platform: availability with every reason, devices, candidates, purity, forks."""

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

from attn_rocm.platform import RocmPlatform
from attn_shared.device import DeviceCapability, DeviceFacts, Fp8Format, Vendor
from attn_shared.errors import InvalidInputError
from attn_shared.inventory import scan
from attn_shared.request import AttentionRequest, Phase
from attn_shared.torch_build import TorchBuild

WriteKfd = Callable[..., Path]
Nodes = Mapping[str, dict[str, int]]

ROCM_BUILD = TorchBuild(version="2.9.0+rocm6.4", hip="6.4.43482")
CUDA_BUILD = TorchBuild(version="2.13.0+cu130", cuda="13.0")


@pytest.fixture
def device_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "dev"
    folder.mkdir()
    (folder / "kfd").touch()
    return folder


def platform(
    sysfs: Path,
    device_folder: Path,
    *,
    build: TorchBuild = ROCM_BUILD,
    environ: Mapping[str, str] | None = None,
    running: tuple[DeviceFacts, ...] | None = None,
) -> RocmPlatform:
    return RocmPlatform(
        torch_build=build,
        environ=environ or {},
        sysfs=sysfs,
        device_folder=device_folder,
        torch_devices=lambda: running,
    )


def request(phase: Phase = Phase.MIXED) -> AttentionRequest:
    return AttentionRequest(num_heads=8, num_kv_heads=2, head_size=64, phase=phase)


def simulated(arch: str, major: int, minor: int, vendor: Vendor = Vendor.AMD) -> DeviceFacts:
    return DeviceFacts(
        vendor=vendor,
        name=arch,
        arch=arch,
        capability=DeviceCapability(vendor=vendor, major=major, minor=minor),
        arch_family="any",
        fp8=Fp8Format.NONE,
        is_simulated=True,
    )


def test_available_with_what_is_there(
    write_kfd: WriteKfd, nodes: Nodes, device_folder: Path
) -> None:
    here = platform(write_kfd(nodes["cpu"], nodes["mi300x"], nodes["mi300x"]), device_folder)
    found = here.availability()
    assert found.is_available
    assert found.reason == ("2 x AMD GPU 1002:74a1 (gfx942); from the kernel's topology (KFD)")
    assert here.is_fp8_fnuz()
    assert here.fp8_dtype() == torch.float8_e4m3fnuz
    assert here.is_device_capability(9, 4)


def test_a_cuda_torch_on_an_amd_machine_shows_the_gpus_and_the_remedy(
    write_kfd: WriteKfd, nodes: Nodes, device_folder: Path
) -> None:
    here = platform(write_kfd(nodes["mi300x"]), device_folder, build=CUDA_BUILD)
    found = here.availability()
    assert not found.is_available
    assert "built for CUDA, not ROCm: install torch's ROCm build" in found.reason
    assert "the kernel shows 1 x AMD GPU 1002:74a1 (gfx942)" in found.reason
    assert here.device().compute_units == 304


def test_without_the_driver(tmp_path: Path, device_folder: Path) -> None:
    reason = platform(tmp_path / "sys", device_folder).availability().reason
    assert reason.startswith("no AMD GPU driver")
    assert "install ROCm's driver amdgpu" in reason


def test_a_machine_with_the_driver_and_no_gpu(
    write_kfd: WriteKfd, nodes: Nodes, device_folder: Path
) -> None:
    reason = platform(write_kfd(nodes["cpu"]), device_folder).availability().reason
    assert reason == "the driver amdgpu lists no GPU that can compute"


def test_a_container_without_its_gpus(
    write_kfd: WriteKfd, nodes: Nodes, device_folder: Path
) -> None:
    reason = platform(write_kfd(nodes["cpu"], None, None), device_folder).availability().reason
    assert "2 nodes of the compute topology may not be read" in reason
    assert "--device=/dev/kfd" in reason


def test_a_missing_device_node_is_told(write_kfd: WriteKfd, nodes: Nodes, tmp_path: Path) -> None:
    found = platform(write_kfd(nodes["mi300x"]), tmp_path).availability()
    assert not found.is_available
    assert f"{tmp_path / 'kfd'} is not there" in found.reason


def test_a_device_node_that_may_not_be_opened_is_told(
    write_kfd: WriteKfd, nodes: Nodes, device_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    found = platform(write_kfd(nodes["mi300x"]), device_folder).availability()
    assert not found.is_available
    assert "may not be opened by this user: join its group" in found.reason


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"HIP_VISIBLE_DEVICES": "-1"}, "HIP_VISIBLE_DEVICES='-1' hides all 1 AMD GPUs"),
        ({"HIP_VISIBLE_DEVICES": "7"}, "'7' names no GPU here and ends the list): unset it"),
        ({"ROCR_VISIBLE_DEVICES": ""}, "ROCR_VISIBLE_DEVICES='' hides all 1 AMD GPUs"),
    ],
)
def test_hidden_gpus_are_told_with_the_variable(
    write_kfd: WriteKfd,
    nodes: Nodes,
    device_folder: Path,
    environ: dict[str, str],
    words: str,
) -> None:
    here = platform(write_kfd(nodes["mi300x"]), device_folder, environ=environ)
    assert here.devices() == ()
    assert words in here.availability().reason


def test_a_change_of_a_variable_is_followed(
    write_kfd: WriteKfd, nodes: Nodes, device_folder: Path
) -> None:
    environ: dict[str, str] = {}
    here = RocmPlatform(
        torch_build=ROCM_BUILD,
        environ=environ,
        sysfs=write_kfd(nodes["mi300x"], nodes["rx7900xtx"]),
        device_folder=device_folder,
        torch_devices=lambda: None,
    )
    assert [device.arch for device in here.devices()] == ["gfx942", "gfx1100"]
    environ["HIP_VISIBLE_DEVICES"] = "1"
    assert [device.arch for device in here.devices()] == ["gfx1100"]


def test_once_torch_runs_hip_its_list_counts(tmp_path: Path, device_folder: Path) -> None:
    here = platform(tmp_path, device_folder, running=(simulated("gfx950", 9, 5),))
    assert [device.arch for device in here.devices()] == ["gfx950"]


@pytest.mark.parametrize("phase", list(Phase))
def test_candidates_of_devices_that_are_not_here(phase: Phase) -> None:
    found = RocmPlatform().candidates(request(phase), simulated("gfx1201", 12, 0))
    assert [candidate.name for candidate in found] == [
        "ROCM_AITER_FA",
        "ROCM_AITER_UNIFIED_ATTN",
        "TRITON_ATTN",
        "TORCH_SDPA",
        "FLEX_ATTENTION",
        "ROCM_ATTN",
    ]


def test_dtypes() -> None:
    dtypes = RocmPlatform().supported_dtypes(simulated("gfx90a", 9, 0))
    assert dtypes == (torch.bfloat16, torch.float16, torch.float32)


def test_a_device_of_another_vendor_is_refused() -> None:
    nvidia = simulated("sm_90", 9, 0, Vendor.NVIDIA)
    with pytest.raises(InvalidInputError, match="vendor nvidia; allowed: a device of vendor amd"):
        RocmPlatform().candidates(request(), nvidia)
    with pytest.raises(InvalidInputError, match="a device of vendor amd"):
        RocmPlatform().supported_dtypes(nvidia)


def test_this_machine_is_described_either_way() -> None:
    found = RocmPlatform().availability()
    assert found.reason
    if TorchBuild.current().hip is None:
        assert not found.is_available
        assert "not ROCm" in found.reason or "without ROCm" in found.reason


def test_importing_the_platform_loads_no_vendor_module_and_no_runtime() -> None:
    code = (
        "import sys, torch\n"
        "import attn_rocm.platform\n"
        "from attn_shared.inventory import scan\n"
        "platform = attn_rocm.platform.RocmPlatform()\n"
        "scan(platform.vendor_specs()), platform.availability()\n"
        "vendors = ('aiter', 'flash_attn', 'triton')\n"
        "print([name for name in sys.modules if name.split('.')[0] in vendors])\n"
        "print(torch.cuda.is_initialized())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["[]", "False"]


def test_vendor_libraries_are_declared() -> None:
    specs = RocmPlatform().vendor_specs()
    assert [spec.name for spec in specs] == ["aiter", "flash_attn", "triton"]
    assert len(scan(specs).entries) == 3


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_a_forked_child_can_ask_after_its_parent_did(
    write_kfd: WriteKfd, nodes: Nodes, device_folder: Path
) -> None:
    here = platform(write_kfd(nodes["mi300x"]), device_folder)
    assert len(here.devices()) == 1
    context = multiprocessing.get_context("fork")
    child = context.Process(target=lambda: sys.exit(3 if len(here.devices()) == 1 else 1))
    child.start()
    child.join(60)
    assert child.exitcode == 3


SMOKE = """
import json, torch
from attn_rocm.platform import RocmPlatform

def facts(platform):
    return [[d.arch, d.compute_units, d.memory_bytes, d.index] for d in platform.devices()]

before = RocmPlatform()
assert before.availability().is_available, before.availability().reason
asked = facts(before)
assert not torch.cuda.is_initialized()
torch.cuda.init()
print(json.dumps({"before": asked, "after": facts(before)}))
"""


@pytest.mark.rocm
def test_facts_agree_with_torchs_on_the_hardware() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SMOKE], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["before"]
    for before, after in zip(told["before"], told["after"], strict=True):
        assert [before[0], before[1], before[3]] == [after[0], after[1], after[3]]
        assert abs(before[2] - after[2]) < 0.02 * before[2]
