"""The CUDA platform: availability with every reason, devices, candidates, purity, forks."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from attn_cuda._vendor.nvml import DriverUnavailableError
from attn_cuda.gpus import DriverReading, Gpu
from attn_cuda.platform import CudaPlatform
from attn_cuda.toolkit import Toolkit
from attn_shared.device import DeviceCapability, DeviceFacts, Fp8Format, Vendor
from attn_shared.errors import InvalidInputError
from attn_shared.inventory import VendorStatus, assume_all, scan
from attn_shared.request import AttentionRequest, Phase
from attn_shared.torch_build import TorchBuild

CUDA_13 = TorchBuild(version="2.13.0+cu130", cuda="13.0")
CPU_BUILD = TorchBuild(version="2.13.0+cpu")
H200 = Gpu(uuid="GPU-aaaa", name="NVIDIA H200", capability=(9, 0), memory_bytes=150_754_820_096)


def driver(*gpus: Gpu, cuda: tuple[int, int] = (13, 0)) -> DriverReading:
    return DriverReading(source="NVML", driver_version="580.159.04", cuda_version=cuda, gpus=gpus)


def unavailable(words: str) -> DriverReading:
    raise DriverUnavailableError(words)


def platform(
    reading: DriverReading | None = None,
    *,
    build: TorchBuild = CUDA_13,
    environ: Mapping[str, str] | None = None,
    runtime: tuple[Gpu, ...] | None = None,
    child: DriverReading | None = None,
    device_folder: Path = Path("/no/device/nodes"),
) -> CudaPlatform:
    return CudaPlatform(
        torch_build=build,
        environ=environ or {},
        read_driver=lambda: reading or unavailable("no NVIDIA driver: install the driver"),
        ask_driver=lambda environ: child or unavailable("CUDA does not answer"),
        torch_gpus=lambda: runtime,
        device_folder=device_folder,
    )


def request(phase: Phase = Phase.MIXED) -> AttentionRequest:
    return AttentionRequest(num_heads=8, num_kv_heads=2, head_size=64, phase=phase)


def simulated(arch: str, major: int, minor: int, vendor: Vendor = Vendor.NVIDIA) -> DeviceFacts:
    return DeviceFacts(
        vendor=vendor,
        name=arch,
        arch=arch,
        capability=DeviceCapability(vendor=vendor, major=major, minor=minor),
        arch_family="any",
        fp8=Fp8Format.NONE,
        is_simulated=True,
    )


def test_available_with_what_is_there() -> None:
    found = platform(driver(H200, H200)).availability()
    assert found.is_available
    assert found.reason == (
        "2 x NVIDIA H200 (sm_90); from NVML, driver 580.159.04, CUDA up to 13.0"
    )


def test_without_driver_and_with_a_cpu_torch_both_reasons_are_told() -> None:
    found = platform(build=CPU_BUILD).availability()
    assert not found.is_available
    assert "no NVIDIA driver: install the driver" in found.reason
    assert "torch 2.13.0+cpu is built without CUDA: install torch's CUDA build" in found.reason


def test_a_cpu_torch_cannot_use_the_gpu_but_its_facts_are_shown() -> None:
    here = platform(driver(H200), build=CPU_BUILD)
    found = here.availability()
    assert not found.is_available
    assert found.reason.startswith("torch 2.13.0+cpu is built without CUDA")
    assert "the driver shows 1 x NVIDIA H200 (sm_90)" in found.reason
    assert here.device().memory_bytes == 150_754_820_096


def test_a_rocm_torch_is_not_a_cuda_torch() -> None:
    build = TorchBuild(version="2.9.0+rocm6.4", hip="6.4.43482")
    assert (
        "is built for ROCm, not CUDA" in platform(driver(H200), build=build).availability().reason
    )


@pytest.mark.parametrize(
    ("cuda", "is_available"), [((12, 9), False), ((13, 0), True), ((14, 1), True)]
)
def test_a_driver_of_an_older_major_is_too_old(cuda: tuple[int, int], is_available: bool) -> None:
    found = platform(driver(H200, cuda=cuda)).availability()
    assert found.is_available is is_available
    if not is_available:
        assert "built for CUDA 13.0" in found.reason
        assert "serves CUDA up to 12.9: update the driver" in found.reason


def test_a_driver_without_gpus() -> None:
    found = platform(driver()).availability()
    assert found.reason == "the NVIDIA driver 580.159.04 finds no GPU"


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("", "CUDA_VISIBLE_DEVICES='' hides all 1 GPUs: unset it"),
        ("-1", "CUDA_VISIBLE_DEVICES='-1' hides all 1 GPUs"),
        ("3", "CUDA_VISIBLE_DEVICES: '3' names no GPU of this machine"),
        ("cat", "CUDA_VISIBLE_DEVICES: 'cat' names no device"),
    ],
)
def test_hidden_gpus_are_told_with_the_variable(value: str, words: str) -> None:
    here = platform(driver(H200), environ={"CUDA_VISIBLE_DEVICES": value})
    assert here.devices() == ()
    assert words in here.availability().reason
    with pytest.raises(InvalidInputError, match="device index is 0; allowed: none: CUDA_VISIBLE"):
        here.device()


def test_mig_mode_without_mig_devices_is_told() -> None:
    empty = Gpu(uuid="GPU-a", name="NVIDIA H200", capability=(9, 0), is_mig_enabled=True)
    assert "MIG mode without a MIG device" in platform(driver(empty)).availability().reason


def test_a_change_of_the_variable_is_followed_without_asking_the_driver_again() -> None:
    asked: list[int] = []
    environ: dict[str, str] = {}

    def read() -> DriverReading:
        asked.append(1)
        return driver(H200, H200)

    here = CudaPlatform(
        torch_build=CUDA_13, environ=environ, read_driver=read, torch_gpus=lambda: None
    )
    assert len(here.devices()) == 2
    assert here.devices() is here.devices()
    environ["CUDA_VISIBLE_DEVICES"] = "1"
    assert len(here.devices()) == 1
    assert asked == [1]


def test_once_torch_runs_cuda_its_list_counts() -> None:
    other = Gpu(uuid="GPU-cccc", name="NVIDIA B200", capability=(10, 0), memory_bytes=2**37)
    here = platform(driver(H200), runtime=(other,), environ={"CUDA_VISIBLE_DEVICES": ""})
    (device,) = here.devices()
    assert (device.name, device.index) == ("NVIDIA B200", 0)
    assert "from torch" in device.notes[0]
    assert here.availability().is_available


def test_without_nvml_cuda_is_asked_if_a_driver_is_there(tmp_path: Path) -> None:
    (tmp_path / "dxg").touch()
    child = DriverReading(
        source="the CUDA driver", driver_version="", cuda_version=(13, 0), gpus=(H200,)
    )
    here = platform(child=child, device_folder=tmp_path)
    assert here.availability().is_available
    assert here.devices()[0].notes[:2] == (
        "from the CUDA driver",
        "no NVIDIA driver: install the driver",
    )


def test_without_nvml_and_cuda_both_words_are_told(tmp_path: Path) -> None:
    (tmp_path / "nvidiactl").touch()
    reason = platform(device_folder=tmp_path).availability().reason
    assert reason == "no NVIDIA driver: install the driver; CUDA does not answer"


def test_versions_of_driver_runtime_and_toolkit() -> None:
    def found(environ: Mapping[str, str]) -> Toolkit:
        return Toolkit(path=Path("/opt/cuda"), version=(12, 9), has_compiler=True)

    here = CudaPlatform(
        torch_build=CUDA_13, environ={}, read_driver=lambda: driver(H200), find_toolkit=found
    )
    assert here.versions() == {
        "driver": "580.159.04",
        "CUDA of the driver": "13.0",
        "CUDA of torch": "13.0",
        "CUDA toolkit": "12.9 in /opt/cuda",
    }


def test_versions_that_are_not_known_are_left_out() -> None:
    here = CudaPlatform(
        torch_build=CPU_BUILD,
        environ={},
        read_driver=lambda: unavailable("no driver"),
        find_toolkit=lambda environ: None,
    )
    assert here.versions() == {}


def test_capability_queries_ask_the_device() -> None:
    here = platform(driver(replace(H200, compute_units=132)))
    assert here.num_compute_units() == 132
    assert here.device_memory_bytes() == 150_754_820_096
    assert not here.is_fp8_fnuz()
    assert here.has_device_capability(8, 0)
    assert here.is_device_capability(9, 0)
    assert here.is_device_capability_family(9)
    assert not here.is_device_capability_family(8)
    assert here.supports_fp8()
    assert here.fp8_dtype() == torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("arch", "major", "minor", "dtypes"),
    [
        ("sm_75", 7, 5, (torch.float16, torch.float32)),
        ("sm_80", 8, 0, (torch.bfloat16, torch.float16, torch.float32)),
        ("sm_121", 12, 1, (torch.bfloat16, torch.float16, torch.float32)),
    ],
)
def test_dtypes(arch: str, major: int, minor: int, dtypes: tuple[torch.dtype, ...]) -> None:
    assert platform().supported_dtypes(simulated(arch, major, minor)) == dtypes


@pytest.mark.parametrize("phase", list(Phase))
def test_candidates_of_devices_that_are_not_here(phase: Phase) -> None:
    found = platform().candidates(request(phase), simulated("sm_103", 10, 3))
    assert [candidate.name for candidate in found] == [
        "FLASH_ATTN",
        "FLASHINFER",
        "TRITON_ATTN",
        "TORCH_SDPA",
        "FLEX_ATTENTION",
        "FLASH_ATTN_DIFFKV",
        "FLASHINFER_TRTLLM",
    ]


def test_a_device_of_another_vendor_is_refused() -> None:
    amd = simulated("gfx942", 9, 4, Vendor.AMD)
    with pytest.raises(InvalidInputError, match="vendor amd; allowed: a device of vendor nvidia"):
        platform().candidates(request(), amd)
    with pytest.raises(InvalidInputError, match="a device of vendor nvidia"):
        platform().supported_dtypes(amd)


def test_vendor_libraries_are_looked_for_without_being_imported() -> None:
    specs = CudaPlatform().vendor_specs()
    names = [spec.name for spec in specs]
    assert names == [
        *("flash_attn", "flash_attn_3", "fa3_fwd", "flash_attn_4"),
        *("vllm_flash_attn_2", "vllm_flash_attn_3", "flashinfer", "flash_mla"),
        *("vllm_cutlass_mla", "triton"),
    ]
    assert all(spec.install and spec.probe.startswith("attn_cuda._vendor.") for spec in specs)
    before = set(sys.modules)
    inventory = scan(specs)
    assert {entry.status for entry in inventory.entries} <= {
        VendorStatus.ABSENT,
        VendorStatus.PRESENT,
    }
    assert not {"flash_attn", "flashinfer", "triton"} & (set(sys.modules) - before)
    assert all(entry.is_usable for entry in assume_all(specs).entries)


def test_importing_the_platform_loads_no_vendor_module_and_no_driver() -> None:
    code = (
        "import sys, torch\n"
        "import attn_cuda.platform\n"
        "from attn_shared.inventory import scan\n"
        "platform = attn_cuda.platform.CudaPlatform()\n"
        "scan(platform.vendor_specs())\n"
        "vendors = ('flash_attn', 'flash_attn_interface', 'fa3_fwd_interface', 'flashinfer',\n"
        "           'flash_mla', 'triton')\n"
        "print([name for name in sys.modules if name.split('.')[0] in vendors])\n"
        "print(torch.cuda.is_initialized())\n"
        "print('libnvidia-ml' in open('/proc/self/maps').read())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:3] == ["[]", "False", "False"]


def _describe_in_child(connection: multiprocessing.connection.Connection) -> None:
    here = CudaPlatform()
    connection.send((here.availability().is_available, len(here.devices())))


def _ask_in_fork() -> tuple[bool, int]:
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_describe_in_child, args=(sender,))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    return receiver.recv()  # type: ignore[no-any-return]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_a_forked_child_can_ask_after_its_parent_did() -> None:
    here = CudaPlatform()
    expected = (here.availability().is_available, len(here.devices()))
    assert _ask_in_fork() == expected


SMOKE = """
import json, torch
from attn_cuda.platform import CudaPlatform

def facts(platform):
    return [[d.name, [d.capability.major, d.capability.minor], d.compute_units, d.memory_bytes,
             d.uuid, d.index] for d in platform.devices()]

from attn_cuda._vendor.cuda_driver import ask_driver
import os
before = CudaPlatform()
assert before.availability().is_available, before.availability().reason
asked = facts(before)
assert not torch.cuda.is_initialized()
child = [[g.name, list(g.capability), g.compute_units, g.uuid] for g in ask_driver(os.environ).gpus]
torch.cuda.init()
print(json.dumps({"before": asked, "child": child, "after": facts(before)}))
"""


@pytest.mark.cuda
def test_facts_agree_with_torchs_on_the_hardware() -> None:
    import json

    done = subprocess.run(
        [sys.executable, "-c", SMOKE], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["before"]
    assert len(told["before"]) == len(told["after"])
    for before, child, after in zip(told["before"], told["child"], told["after"], strict=True):
        name, capability, units, memory, uuid, index = before
        assert [name, capability, units, uuid, index] == [*after[:3], *after[4:]]
        assert child == [name, capability, units, uuid]
        assert abs(memory - after[3]) < 0.02 * memory  # the driver keeps some for itself


@pytest.mark.cuda
def test_asking_leaves_a_fork_able_to_run_cuda_on_the_hardware() -> None:
    code = (
        "import os, torch\n"
        "from attn_cuda.platform import CudaPlatform\n"
        "platform = CudaPlatform()\n"
        "read = [device.uuid for device in platform.devices()]\n"
        "versions = platform.versions()\n"
        "assert read and versions and not torch.cuda.is_initialized()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    works = torch.ones(1).cuda().item() == 1\n"
        "    os._exit(0 if works and [d.uuid for d in platform.devices()] == read else 1)\n"
        "raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
