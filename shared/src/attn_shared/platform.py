"""The abstract class of a platform: is it here, what are its devices, how do its backends rank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, final

import torch

from attn_shared.device import DeviceFacts, Fp8Format, Vendor, common_fp8_dtype
from attn_shared.dtypes import dtype_name
from attn_shared.errors import InvalidInputError, UnsupportedOptionError
from attn_shared.inventory import VendorSpec
from attn_shared.request import AttentionRequest

__all__ = ["Availability", "Candidate", "Platform", "PriorityBand"]


class PriorityBand:
    """Where a candidate's priority lies; the higher number is preferred.

    A third party's backend that sets `auto_priority` between two bands knows what it beats.
    """

    REFERENCE = 0
    PORTABLE = 100
    PERFORMANT = 200
    SPECIALISED = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Availability:
    """Whether a platform is usable on this machine, and why (or why not)."""

    is_available: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A backend that a platform offers for a request, ranked.

    Attributes:
        name: the backend's registered name.
        priority: the higher, the earlier "auto" takes it; None: by name only.
        provenance: where the rank comes from (a measurement, a report, a rule).
    """

    name: str
    priority: int | None
    provenance: str


class Platform(ABC):
    """One vendor's devices on this machine, and the backends offered for them.

    Detection starts no runtime (no CUDA context, no XPU queue) and survives a fork.

    Class attributes:
        name: the short name ("cuda"), as in `nox -s cuda`.
        vendor: whose devices these are.
        torch_device_type: torch's name for them.
        distribution: the package that brings this platform.
        precedence: with several platforms available, the lowest is the current one.
        samplers: "module:Class" of the samplers for its devices, beside the one in torch.
    """

    name: ClassVar[str]
    vendor: ClassVar[Vendor]
    torch_device_type: ClassVar[str]
    distribution: ClassVar[str]
    precedence: ClassVar[int]
    samplers: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def availability(self) -> Availability:
        """Say whether this machine has such a device, with the reason either way."""

    @abstractmethod
    def devices(self) -> tuple[DeviceFacts, ...]:
        """Return the facts of each visible device, in the runtime's order; empty if none."""

    @abstractmethod
    def candidates(self, request: AttentionRequest, device: DeviceFacts) -> tuple[Candidate, ...]:
        """Return the backends offered for a request on a device, with their default ranks.

        Pure: also asked about devices that are not here.
        """

    def mla_prefills(self, request: AttentionRequest, device: DeviceFacts) -> tuple[Candidate, ...]:
        """Return the prefills over latents offered on a device, with their default ranks.

        Pure, as `candidates`; the request is one of `attn_shared.mla_prefill.prefill_request`.
        """
        return ()

    @abstractmethod
    def vendor_specs(self) -> tuple[VendorSpec, ...]:
        """Return how to find each library that the platform's backends can use."""

    def versions(self) -> dict[str, str]:
        """Return what is known of the versions beneath: driver, runtime, toolkit; by name."""
        return {}

    @final
    def device(self, index: int = 0) -> DeviceFacts:
        """Return the facts of one visible device.

        Raises:
            InvalidInputError: there is no such device; says how many there are and why.
        """
        devices = self.devices()
        if not 0 <= index < len(devices):
            raise InvalidInputError.for_argument(
                "device index",
                index,
                f"0 to {len(devices) - 1}" if devices else "none: " + self.availability().reason,
            )
        return devices[index]

    # Capability queries. Each asks one device, never "the" device for all.

    @final
    def has_device_capability(self, major: int, minor: int = 0, *, index: int = 0) -> bool:
        """Whether the capability is at least major.minor; False where the device has none."""
        capability = self.device(index).capability
        return capability is not None and capability.at_least(major, minor)

    @final
    def is_device_capability(self, major: int, minor: int = 0, *, index: int = 0) -> bool:
        """Whether the capability is exactly major.minor."""
        capability = self.device(index).capability
        return capability is not None and capability.is_exactly(major, minor)

    @final
    def is_device_capability_family(self, major: int, *, index: int = 0) -> bool:
        """Whether the capability is of the family major.x."""
        capability = self.device(index).capability
        return capability is not None and capability.is_family(major)

    @final
    def supports_fp8(self, *, index: int = 0) -> bool:
        """Whether the device has fp8 arithmetic."""
        return self.device(index).fp8 is not Fp8Format.NONE

    @final
    def is_fp8_fnuz(self, *, index: int = 0) -> bool:
        """Whether the device's e4m3 is the fnuz flavour."""
        return self.device(index).fp8 is Fp8Format.E4M3FNUZ

    @final
    def fp8_dtype(self, *, index: int = 0) -> torch.dtype | None:
        """Return the device's e4m3 dtype, or None."""
        return self.device(index).fp8_dtype

    @final
    def common_fp8_dtype(self, indices: Iterable[int] | None = None) -> torch.dtype | None:
        """Return the e4m3 dtype that a group of devices shares; None where none has fp8.

        Args:
            indices: of the group; None is all visible devices.

        Raises:
            InvalidInputError: they differ, or there is no such device.
        """
        group = self.devices() if indices is None else map(self.device, indices)
        return common_fp8_dtype(group)

    @final
    def num_compute_units(self, *, index: int = 0) -> int | None:
        """Return the device's multiprocessors, compute units, Xe cores or cores."""
        return self.device(index).compute_units

    @final
    def device_memory_bytes(self, *, index: int = 0) -> int | None:
        """Return the device's memory in bytes (of the slice, for a MIG device)."""
        return self.device(index).memory_bytes

    def supported_dtypes(self, device: DeviceFacts) -> tuple[torch.dtype, ...]:
        """Return the compute dtypes of a device; the first is what "auto" falls back to."""
        return (torch.bfloat16, torch.float16, torch.float32)

    @final
    def check_if_supports_dtype(self, dtype: torch.dtype, *, index: int = 0) -> None:
        """Refuse a dtype that the device has no arithmetic for.

        Raises:
            UnsupportedOptionError: with the device and what it supports.
        """
        device = self.device(index)
        allowed = self.supported_dtypes(device)
        if dtype not in allowed:
            raise UnsupportedOptionError(
                f"{device.name} ({device.arch}) does not support dtype={dtype_name(dtype)}; "
                f"allowed: {', '.join(map(dtype_name, allowed))}."
            )
