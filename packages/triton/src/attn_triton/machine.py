"""What the kernels must know of a device: its architecture and how many programs run at once."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from attn_shared.arch import Arch, parse_arch
from attn_shared.dtypes import dtype_name
from attn_shared.errors import UnsupportedOptionError
from attn_shared.vendor import Fp8Format, Vendor

__all__ = ["Machine", "has_dependent_launch", "machine_of", "require_readable"]

_FIRST_DEPENDENT = 9  # compute capability, major
_INTERPRETED = "sm_90"  # whose shapes the interpreter runs
_FLAVOURS = {
    torch.float8_e4m3fn: Fp8Format.E4M3FN,
    torch.float8_e4m3fnuz: Fp8Format.E4M3FNUZ,
}
_CACHE_BYTES = 32 * 2**20  # where it is not known
_INTERPRETED_UNITS = 4  # few, so that small batches are cut and large ones are not


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A device.

    Attributes:
        arch: its architecture.
        compute_units: multiprocessors, compute units or Xe cores.
        cache_bytes: of the last cache that all of them share.
        has_dependent_launch: whether a kernel may begin while the one before it ends.
    """

    arch: Arch
    compute_units: int
    cache_bytes: int = _CACHE_BYTES
    has_dependent_launch: bool = False


@functools.cache
def machine_of(device: torch.device) -> Machine:
    """Return what a torch device is; a CPU stands for the interpreter."""
    if device.type == "cpu":
        return Machine(arch=parse_arch(_INTERPRETED), compute_units=_INTERPRETED_UNITS)
    if device.type == "xpu":
        found = torch.xpu.get_device_properties(device)
        return Machine(arch=Arch(vendor=Vendor.INTEL, canonical="xpu"), compute_units=_units(found))
    properties = torch.cuda.get_device_properties(device)
    name = getattr(properties, "gcnArchName", "") if torch.version.hip else ""
    arch = parse_arch(name or f"{properties.major}.{properties.minor}")
    cache = getattr(properties, "L2_cache_size", 0) or _CACHE_BYTES
    return Machine(
        arch=arch,
        compute_units=properties.multi_processor_count,
        cache_bytes=cache,
        has_dependent_launch=has_dependent_launch(arch),
    )


def has_dependent_launch(arch: Arch) -> bool:
    """Return whether kernels there may begin while the one before them ends: Hopper and newer."""
    number = arch.capability
    return arch.vendor is Vendor.NVIDIA and number is not None and number.major >= _FIRST_DEPENDENT


def require_readable(dtype: torch.dtype, device: torch.device) -> None:
    """Refuse a cache in a flavour of e4m3 that Triton does not read on the device.

    Raises:
        UnsupportedOptionError: names the flavour and the device's.
    """
    flavour = _FLAVOURS.get(dtype)
    if flavour is None:
        return
    arch = machine_of(device).arch
    if arch.fp8 is not flavour:
        raise UnsupportedOptionError(
            f"a cache of {dtype_name(dtype)} on {arch.canonical}, whose e4m3 flavour is "
            f"{arch.fp8}; allowed: that one, fp8_e5m2, or another format.",
            hint="allocate the cache with the flavour of the device that reads it.",
        )


def _units(properties: object) -> int:
    """Return the Xe cores of an Intel GPU, of eight vector engines each."""
    return max(1, int(getattr(properties, "gpu_eu_count", 8)) // 8)
