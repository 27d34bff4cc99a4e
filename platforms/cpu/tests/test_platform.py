"""The CPU platform: facts, dtypes, candidates."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from attn_cpu.platform import CpuPlatform
from attn_shared.device import DeviceCapability, DeviceFacts, Fp8Format, Vendor
from attn_shared.errors import InvalidInputError
from attn_shared.platform import PriorityBand
from attn_shared.request import AttentionRequest, Phase

ZEN4_FLAGS = "fpu avx f16c fma avx2 avx512f avx512dq avx512bw avx512vl avx512_bf16 avx512_vnni"


def write_machine(root: Path, flags: str = ZEN4_FLAGS) -> Path:
    cpuinfo = "".join(
        f"processor\t: {cpu}\nmodel name\t: AMD EPYC 9654\nflags\t\t: {flags}\n\n" for cpu in (0, 1)
    )
    files = {"proc/cpuinfo": cpuinfo, "proc/meminfo": "MemTotal: 1048576 kB\n"}
    for cpu in (0, 1):
        folder = f"sys/devices/system/cpu/cpu{cpu}/topology"
        files[f"{folder}/thread_siblings_list"] = f"{cpu}\n"
        files[f"{folder}/physical_package_id"] = "0\n"
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def request(phase: Phase = Phase.MIXED) -> AttentionRequest:
    return AttentionRequest(num_heads=8, num_kv_heads=2, head_size=64, phase=phase)


def simulated(**changes: object) -> DeviceFacts:
    values: dict[str, object] = {
        "vendor": Vendor.CPU,
        "name": "a CPU",
        "arch": "x86_64",
        "capability": None,
        "arch_family": "x86",
        "fp8": Fp8Format.NONE,
        "is_simulated": True,
    }
    return DeviceFacts(**{**values, **changes})  # type: ignore[arg-type]


def test_this_machine_is_one_available_device() -> None:
    platform = CpuPlatform()
    availability = platform.availability()
    (device,) = platform.devices()
    assert availability.is_available
    assert device.name in availability.reason
    assert (device.vendor, device.index, device.is_simulated) == (Vendor.CPU, 0, False)
    assert device.compute_units is not None
    assert device.compute_units >= 1
    assert platform.num_compute_units() == device.compute_units
    assert platform.fp8_dtype() is None
    assert not platform.has_device_capability(8, 0)
    json.dumps(device.to_dict())


def test_facts_come_from_the_files(tmp_path: Path) -> None:
    platform = CpuPlatform(root=write_machine(tmp_path), cpus=lambda: (0, 1), machine="x86_64")
    (device,) = platform.devices()
    assert (device.name, device.arch, device.arch_family) == ("AMD EPYC 9654", "x86_64", "x86")
    assert device.memory_bytes == 2**30
    assert device.compute_units == 2
    assert device.has_isa("avx512_bf16")
    assert platform.availability().reason == "AMD EPYC 9654 (x86_64): 2 cores, AVX-512 with bf16"


def test_affinity_narrows_the_device(tmp_path: Path) -> None:
    platform = CpuPlatform(root=write_machine(tmp_path), cpus=lambda: (1,), machine="x86_64")
    assert platform.num_compute_units() == 1
    assert platform.topology().cpus == (1,)


@pytest.mark.parametrize(
    ("machine", "arch", "family"),
    [("AMD64", "x86_64", "x86"), ("arm64", "aarch64", "arm"), ("mips64", "mips64", "unknown")],
)
def test_machines_of_other_systems(tmp_path: Path, machine: str, arch: str, family: str) -> None:
    (device,) = CpuPlatform(root=tmp_path, cpus=lambda: (0,), machine=machine).devices()
    assert (device.arch, device.arch_family) == (arch, family)


def test_without_cpuinfo_torch_is_asked_and_the_facts_say_so(tmp_path: Path) -> None:
    (device,) = CpuPlatform(root=tmp_path, cpus=lambda: (0,), machine="x86_64").devices()
    level = torch.backends.cpu.get_cpu_capability()
    assert any(f"torch's dispatch level {level} implies" in note for note in device.notes)
    assert device.memory_bytes is None


@pytest.mark.parametrize(
    ("isa", "first"),
    [
        (("avx2",), torch.float32),
        (("avx2", "avx512f"), torch.float32),
        (("avx512f", "avx512_bf16"), torch.bfloat16),
        (("asimd", "bf16"), torch.bfloat16),
    ],
)
def test_dtypes_start_with_what_the_cpu_computes_in(
    isa: tuple[str, ...], first: torch.dtype
) -> None:
    dtypes = CpuPlatform().supported_dtypes(simulated(isa=isa))
    assert dtypes[0] == first
    assert set(dtypes) == {torch.float32, torch.bfloat16, torch.float16}


@pytest.mark.parametrize("phase", list(Phase))
def test_candidates_of_a_machine_that_is_not_here(phase: Phase) -> None:
    found = CpuPlatform().candidates(request(phase), simulated(arch="riscv64", arch_family="riscv"))
    names = [candidate.name for candidate in found]
    assert sorted(names) == ["CPU_ATTN", "FLEX_ATTENTION", "TORCH_SDPA"]
    assert names.index("TORCH_SDPA") < names.index("FLEX_ATTENTION")
    assert found[names.index("TORCH_SDPA")].priority == PriorityBand.PORTABLE


def test_a_device_of_another_vendor_is_refused() -> None:
    gpu = simulated(
        vendor=Vendor.NVIDIA,
        arch="sm_90",
        arch_family="hopper",
        capability=DeviceCapability(vendor=Vendor.NVIDIA, major=9, minor=0),
    )
    with pytest.raises(InvalidInputError, match="vendor nvidia; allowed: a device of vendor cpu"):
        CpuPlatform().candidates(request(), gpu)
    with pytest.raises(InvalidInputError, match="device of vendor cpu"):
        CpuPlatform().supported_dtypes(gpu)


def test_a_second_device_does_not_exist() -> None:
    with pytest.raises(InvalidInputError, match="device index is 1; allowed: 0 to 0"):
        CpuPlatform().device(1)


def test_its_own_kernels_are_the_one_library() -> None:
    assert [spec.name for spec in CpuPlatform().vendor_specs()] == ["attn_cpu_kernels"]


def test_facts_are_read_once(tmp_path: Path) -> None:
    asked = []
    platform = CpuPlatform(
        root=write_machine(tmp_path), cpus=lambda: asked.append(1) or (0, 1), machine="x86_64"
    )
    assert platform.devices() == platform.devices()
    assert platform.availability() == platform.availability()
    assert asked == [1]


def test_importing_the_platform_reads_nothing_of_the_machine() -> None:
    code = (
        "import builtins, io, pathlib, sys, torch, attn_shared.platform, attn_shared.ranking\n"
        "opened = []\n"
        "sys.addaudithook(lambda event, args: event == 'open' and opened.append(str(args[0])))\n"
        "import attn_cpu.platform\n"
        "print([path for path in opened if path.startswith(('/proc', '/sys'))])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
