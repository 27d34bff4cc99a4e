"""NVIDIA GPUs as the driver lists them, and which of them a CUDA process sees, in what order.

Sources: NVIDIA's CUDA programming guide (CUDA_VISIBLE_DEVICES, CUDA_DEVICE_ORDER) and its MIG user
guide (device enumeration, device identifiers).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from attn_shared.visible_devices import VisibleDevice, VisibleDeviceKind, VisibleDevices

__all__ = ["DriverReading", "Gpu", "VisibleGpus", "visible_gpus"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU, or one MIG device of a GPU.

    Attributes:
        uuid: "GPU-..." or "MIG-...".
        name: the marketing name.
        capability: (major, minor).
        memory_bytes: its memory, the slice's own for a MIG device; None if it has none of its own.
        compute_units: multiprocessors; None if unknown.
        pci_bus_id: "00000000:3B:00.0"; "" if unknown.
        mig_devices: what a GPU in MIG mode is divided into; each has the parent's `pci_bus_id`.
        is_mig_enabled: the GPU is in MIG mode: CUDA uses its MIG devices only.
        gpu_instance, compute_instance: numbers of a MIG device; None for a whole GPU.
    """

    uuid: str
    name: str
    capability: tuple[int, int]
    memory_bytes: int | None = None
    compute_units: int | None = None
    pci_bus_id: str = ""
    mig_devices: tuple[Gpu, ...] = ()
    is_mig_enabled: bool = False
    gpu_instance: int | None = None
    compute_instance: int | None = None

    @property
    def is_mig(self) -> bool:
        """Whether this is a MIG device."""
        return self.gpu_instance is not None

    def is_like(self, other: Gpu) -> bool:
        """Whether the two are interchangeable for every purpose of selection."""
        return _kind_of(self) == _kind_of(other)


def _kind_of(gpu: Gpu) -> tuple[object, ...]:
    facts = (gpu.name, gpu.capability, gpu.memory_bytes, gpu.compute_units)
    return (*facts, tuple(map(_kind_of, gpu.mig_devices)))


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverReading:
    """What the driver said.

    Attributes:
        source: who was asked: "NVML".
        driver_version: "580.159.04"; "" if unknown.
        cuda_version: the newest CUDA that the driver serves, (13, 0).
        gpus: in the order of their PCI addresses.
        problems: GPUs that could not be read, in the driver's words.
    """

    source: str
    driver_version: str
    cuda_version: tuple[int, int] | None
    gpus: tuple[Gpu, ...]
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class VisibleGpus:
    """What a CUDA process sees.

    Attributes:
        gpus: in CUDA's order, if that is known.
        is_order_known: CUDA's own order, "fastest first", cannot be told apart from here where
            GPUs differ and nothing names them.
        problem: what was wrong with CUDA_VISIBLE_DEVICES; "" if nothing.
    """

    gpus: tuple[Gpu, ...]
    is_order_known: bool
    problem: str = ""


def visible_gpus(
    gpus: Sequence[Gpu], visible: VisibleDevices | None, device_order: str | None
) -> VisibleGpus:
    """Return what a CUDA process sees of these GPUs.

    Args:
        gpus: all of the machine's, in any order.
        visible: CUDA_VISIBLE_DEVICES, parsed; None if not set.
        device_order: CUDA_DEVICE_ORDER; None if not set.
    """
    ordered = sorted(gpus, key=lambda gpu: gpu.pci_bus_id)
    if visible is None:
        chosen, problem = ordered, ""
    else:
        chosen, problem = _choose(ordered, visible)
    is_known = (
        device_order == "PCI_BUS_ID"
        or all(gpu.is_like(ordered[0]) for gpu in ordered)
        or (visible is not None and all(e.kind is not VisibleDeviceKind.ORDINAL for e in visible))
    )
    return VisibleGpus(gpus=_as_cuda_counts(chosen), is_order_known=is_known, problem=problem)


def _choose(ordered: Sequence[Gpu], visible: VisibleDevices) -> tuple[list[Gpu], str]:
    """Follow the list up to its first entry that names nothing, as CUDA does."""
    chosen: list[Gpu] = []
    for entry in visible:
        found = _find(ordered, entry)
        if found is None:
            return chosen, f"{entry.value!r} names no GPU of this machine and ends the list"
        chosen.append(found)
    return chosen, visible.problem


def _find(ordered: Sequence[Gpu], entry: VisibleDevice) -> Gpu | None:
    if entry.ordinal is not None:
        return ordered[entry.ordinal] if entry.ordinal < len(ordered) else None
    if entry.parent_uuid is not None:
        return next((mig for gpu in ordered for mig in _instances(gpu, entry)), None)
    migs = [mig for gpu in ordered for mig in gpu.mig_devices]
    pool = migs if entry.kind is VisibleDeviceKind.MIG else ordered
    matches = [gpu for gpu in pool if entry.matches_uuid(gpu.uuid)]
    return matches[0] if len(matches) == 1 else None  # an ambiguous beginning names nothing


def _instances(gpu: Gpu, entry: VisibleDevice) -> list[Gpu]:
    """Return the MIG device that "MIG-GPU-.../gi/ci" names, if it is of this GPU."""
    if (entry.parent_uuid or "").lower() != gpu.uuid.lower():
        return []
    numbers = (entry.gpu_instance, entry.compute_instance)
    return [mig for mig in gpu.mig_devices if (mig.gpu_instance, mig.compute_instance) == numbers]


def _as_cuda_counts(chosen: Sequence[Gpu]) -> tuple[Gpu, ...]:
    """Apply MIG's rule: a process sees one MIG device, the first, and then no whole GPU."""
    migs = [mig for gpu in chosen for mig in ([gpu] if gpu.is_mig else gpu.mig_devices)]
    if migs:
        return (migs[0],)
    return tuple(gpu for gpu in chosen if not gpu.is_mig_enabled)
