"""`DeviceFacts` of the GPUs that this process sees: from NVML, or from torch once it runs CUDA."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from attn_cuda._vendor.nvml import DriverUnavailableError
from attn_cuda.gpus import DriverReading, Gpu, VisibleGpus, visible_gpus
from attn_shared.arch import parse_arch
from attn_shared.device import DeviceFacts, Vendor
from attn_shared.torch_build import Runtime, is_running
from attn_shared.visible_devices import parse_visible_devices

__all__ = ["Visible", "facts_of", "find_visible", "torch_gpus"]

_ORDER_UNKNOWN = (
    "which of this machine's unequal GPUs this is cannot be told: CUDA counts the fastest first; "
    "set CUDA_DEVICE_ORDER=PCI_BUS_ID, or name GPUs by UUID in CUDA_VISIBLE_DEVICES"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Visible:
    """What this process sees, and where that was read.

    Attributes:
        devices: in torch's order.
        reading: what the driver said of the whole machine; None if torch was asked.
        problem: why there are fewer devices than one may expect; "" if nothing.
    """

    devices: tuple[DeviceFacts, ...]
    reading: DriverReading | None = None
    problem: str = ""


def torch_gpus() -> tuple[Gpu, ...] | None:
    """Return the GPUs as torch counts them if its CUDA runtime is up, else None."""
    if not is_running(Runtime.CUDA):
        return None
    return tuple(map(_torch_gpu, range(torch.cuda.device_count())))


def _torch_gpu(index: int) -> Gpu:
    properties = torch.cuda.get_device_properties(index)
    return Gpu(
        uuid=f"GPU-{properties.uuid}",
        name=properties.name,
        capability=(properties.major, properties.minor),
        memory_bytes=properties.total_memory,
        compute_units=properties.multi_processor_count,
    )


def find_visible(
    reading: DriverReading,
    environ: Mapping[str, str],
    ask_driver: Callable[[Mapping[str, str]], DriverReading],
) -> Visible:
    """Return the facts of the GPUs that CUDA will show in this environment.

    Args:
        reading: what NVML says of the whole machine.
        environ: for CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER, which are CUDA's own.
        ask_driver: returns what CUDA shows, in its order; asked where it cannot be known otherwise.
    """
    seen = visible_gpus(
        reading.gpus,
        parse_visible_devices(environ.get("CUDA_VISIBLE_DEVICES")),
        environ.get("CUDA_DEVICE_ORDER"),
    )
    problem = "; ".join(filter(None, [_variable_problem(seen), *reading.problems]))
    source = _source_note(reading)
    if not seen.is_order_known:
        return _in_cudas_order(seen, reading, environ, ask_driver, problem)
    devices = tuple(
        facts_of(gpu, index=index, notes=(source,)) for index, gpu in enumerate(seen.gpus)
    )
    return Visible(devices=devices, reading=reading, problem=problem)


def _in_cudas_order(
    seen: VisibleGpus,
    reading: DriverReading,
    environ: Mapping[str, str],
    ask_driver: Callable[[Mapping[str, str]], DriverReading],
    problem: str,
) -> Visible:
    """Ask CUDA for the order of unequal GPUs; where it does not answer, say so."""
    try:
        answer = ask_driver(environ)
    except DriverUnavailableError as error:
        unknown = (_source_note(reading), _ORDER_UNKNOWN, str(error))
        devices = tuple(facts_of(gpu, index=None, notes=unknown) for gpu in seen.gpus)
    else:
        known = (_source_note(reading), "in CUDA's own order, asked in a child process")
        devices = tuple(
            facts_of(gpu, index=index, notes=known) for index, gpu in enumerate(answer.gpus)
        )
    return Visible(devices=devices, reading=reading, problem=problem)


def _variable_problem(seen: VisibleGpus) -> str:
    return f"CUDA_VISIBLE_DEVICES: {seen.problem}" if seen.problem else ""


def _source_note(reading: DriverReading) -> str:
    words = [f"from {reading.source}"]
    if reading.driver_version:
        words.append(f"driver {reading.driver_version}")
    if reading.cuda_version is not None:
        words.append("CUDA up to {}.{}".format(*reading.cuda_version))
    return ", ".join(words)


def facts_of(gpu: Gpu, *, index: int | None, notes: tuple[str, ...]) -> DeviceFacts:
    """Return a GPU as selection sees it; `index` is torch's number, None where it is not known."""
    arch = parse_arch("{}.{}".format(*gpu.capability))
    if gpu.is_mig:
        notes = (*notes, "a MIG device: memory and multiprocessors are the slice's own")
    elif gpu.memory_bytes is None:
        notes = (*notes, "the driver states no memory of its own: it shares the host's")
    return DeviceFacts(
        vendor=Vendor.NVIDIA,
        name=gpu.name,
        arch=arch.canonical,
        capability=arch.capability,
        arch_family=arch.family,
        fp8=arch.fp8,
        memory_bytes=gpu.memory_bytes,
        compute_units=gpu.compute_units,
        shared_memory_bytes=arch.shared_memory_bytes,
        wave_size=arch.wave_size,
        index=index,
        uuid=gpu.uuid,
        notes=notes,
    )
