"""`DeviceFacts` of the GPUs that this process sees: from KFD, or from torch once it runs HIP.

Which GPUs a process sees: ROCR_VISIBLE_DEVICES filters what the kernel lists, and numbers it anew;
HIP_VISIBLE_DEVICES (CUDA_VISIBLE_DEVICES where that is empty) filters the result. Source: ROCm's
documentation of GPU isolation and its runtime's source (clr, rocdevice.cpp).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from attn_rocm.kfd import KfdGpu, KfdReading, gfx_name
from attn_shared.arch import parse_arch
from attn_shared.device import DeviceFacts, Vendor
from attn_shared.torch_build import Runtime, is_running
from attn_shared.visible_devices import VisibleDevice, parse_visible_devices

__all__ = ["Visible", "facts_of", "find_visible", "torch_devices"]

_OVERRIDE = re.compile(r"(\d+)\.(\d+)\.(\d+)")
_UNEQUAL = "the GPUs differ: numbered as the kernel lists them, the order that HIP starts from"


@dataclass(frozen=True, slots=True, kw_only=True)
class Visible:
    """What this process sees.

    Attributes:
        devices: in torch's order.
        problem: what was wrong with the variables that filter; "" if nothing.
    """

    devices: tuple[DeviceFacts, ...]
    problem: str = ""


def torch_devices() -> tuple[DeviceFacts, ...] | None:
    """Return the devices as torch counts them if its HIP runtime is up, else None."""
    if not is_running(Runtime.ROCM):
        return None
    return tuple(map(_torch_device, range(torch.cuda.device_count())))


def _torch_device(index: int) -> DeviceFacts:
    properties = torch.cuda.get_device_properties(index)
    arch = parse_arch(properties.gcnArchName)
    notes = ["from torch, whose HIP runtime is up"]
    units = properties.multi_processor_count
    if arch.family.startswith("rdna"):
        units *= 2
        notes.append("torch counts workgroup processors, pairs of CUs")
    return DeviceFacts(
        vendor=Vendor.AMD,
        name=properties.name,
        arch=arch.canonical,
        capability=arch.capability,
        arch_family=arch.family,
        fp8=arch.fp8,
        memory_bytes=properties.total_memory,
        compute_units=units,
        shared_memory_bytes=arch.shared_memory_bytes,
        wave_size=getattr(properties, "warp_size", None) or arch.wave_size,
        index=index,
        notes=tuple(notes),
    )


def find_visible(reading: KfdReading, environ: Mapping[str, str]) -> Visible:
    """Return the facts of the GPUs that HIP will show in this environment.

    Args:
        reading: what the kernel lists.
        environ: for ROCR_, HIP_ and CUDA_VISIBLE_DEVICES and HSA_OVERRIDE_GFX_VERSION, which are
            the runtime's own.
    """
    gpus: Sequence[KfdGpu] = reading.gpus
    problems: list[str] = []
    for variable in ("ROCR_VISIBLE_DEVICES", _hip_variable(environ)):
        value = environ.get(variable)
        gpus, problem = _filter(gpus, value)
        if problem:
            problems.append(f"{variable}: {problem}")
    notes = _notes(reading, gpus, environ)
    override = _override(environ)
    devices = tuple(
        facts_of(gpu, index=index, notes=notes, override=override) for index, gpu in enumerate(gpus)
    )
    return Visible(devices=devices, problem="; ".join(problems))


def _hip_variable(environ: Mapping[str, str]) -> str:
    """HIP reads CUDA's variable where its own is empty; an empty one filters nothing."""
    names = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
    return next((name for name in names if environ.get(name)), "")


def _filter(gpus: Sequence[KfdGpu], value: str | None) -> tuple[Sequence[KfdGpu], str]:
    visible = parse_visible_devices(value, repeats_allowed=True)
    if visible is None:
        return gpus, ""
    chosen: list[KfdGpu] = []
    for entry in visible:
        found = _find(gpus, entry)
        if found is None:
            return chosen, f"{entry.value!r} names no GPU here and ends the list"
        if found not in chosen:
            chosen.append(found)
    return chosen, visible.problem


def _find(gpus: Sequence[KfdGpu], entry: VisibleDevice) -> KfdGpu | None:
    if entry.ordinal is not None:
        return gpus[entry.ordinal] if entry.ordinal < len(gpus) else None
    matches = [gpu for gpu in gpus if gpu.uuid is not None and entry.matches_uuid(gpu.uuid)]
    return matches[0] if len(matches) == 1 else None


def _override(environ: Mapping[str, str]) -> str | None:
    """HSA_OVERRIDE_GFX_VERSION=11.0.0 makes the runtime take every GPU for a gfx1100."""
    match = _OVERRIDE.fullmatch(environ.get("HSA_OVERRIDE_GFX_VERSION", ""))
    if match is None:
        return None
    major, minor, stepping = map(int, match.groups())
    return gfx_name(major * 10000 + minor * 100 + stepping)


def _notes(
    reading: KfdReading, gpus: Sequence[KfdGpu], environ: Mapping[str, str]
) -> tuple[str, ...]:
    version = f", amdgpu {reading.driver_version}" if reading.driver_version else ""
    notes = [f"from the kernel's topology (KFD){version}"]
    if len({(gpu.arch, gpu.memory_bytes, gpu.compute_units) for gpu in gpus}) > 1:
        notes.append(_UNEQUAL)
    return tuple(notes)


def facts_of(
    gpu: KfdGpu, *, index: int, notes: tuple[str, ...] = (), override: str | None = None
) -> DeviceFacts:
    """Return a GPU as selection sees it.

    Args:
        gpu: as the kernel lists it.
        index: the number that torch gives it.
        notes: on the source of the facts.
        override: the architecture that HSA_OVERRIDE_GFX_VERSION makes of it.
    """
    arch = parse_arch(override or gpu.arch)
    if override is not None and override != gpu.arch:
        notes = (*notes, f"a {gpu.arch} that HSA_OVERRIDE_GFX_VERSION makes a {override}")
    if gpu.is_apu:
        notes = (*notes, "shares the host's memory: what is counted is its own part of it")
    return DeviceFacts(
        vendor=Vendor.AMD,
        name=gpu.name or f"AMD GPU {gpu.pci_id}",
        arch=arch.canonical,
        capability=arch.capability,
        arch_family=arch.family,
        fp8=arch.fp8,
        memory_bytes=gpu.memory_bytes,
        compute_units=gpu.compute_units,
        shared_memory_bytes=gpu.lds_bytes or arch.shared_memory_bytes,
        wave_size=gpu.wavefront or arch.wave_size,
        index=index,
        uuid=gpu.uuid,
        notes=notes,
    )
