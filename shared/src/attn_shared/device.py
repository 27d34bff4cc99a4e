"""What a device is, as plain data, so that any machine can be asked about from any machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

import torch

from attn_shared.arch import DeviceCapability, Fp8Format, Vendor
from attn_shared.errors import InvalidInputError, UnknownNameError

__all__ = ["DeviceCapability", "DeviceFacts", "Fp8Format", "Vendor"]

_FP8_DTYPES = MappingProxyType(
    {Fp8Format.E4M3FN: torch.float8_e4m3fn, Fp8Format.E4M3FNUZ: torch.float8_e4m3fnuz}
)

_TORCH_DEVICE_TYPES = MappingProxyType(
    {
        Vendor.NVIDIA: "cuda",
        Vendor.AMD: "cuda",  # torch for ROCm keeps CUDA's names
        Vendor.INTEL: "xpu",
        Vendor.CPU: "cpu",
    }
)

_E = TypeVar("_E", Vendor, Fp8Format)

_NUMBERED_VENDORS = frozenset({Vendor.NVIDIA, Vendor.AMD})


class _CachedHash:
    """The slot of a lazily computed hash; no field, so that it is neither compared nor pickled.

    A pickled hash would be wrong in the next process, where strings hash differently.
    """

    __slots__ = ("_hash",)

    _hash: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts(_CachedHash):
    """All that selection may depend on about one device. Frozen, hashable, JSON-safe.

    Attributes:
        vendor: who makes it.
        name: the marketing name, "NVIDIA H200".
        arch: the canonical architecture name: "sm_90", "gfx942", "bmg", "x86_64".
        capability: the vendor's number; None for Intel and CPU, which have none.
        arch_family: the generation: "hopper", "blackwell", "cdna3", "rdna4", "xe2", "x86",
            or "unknown".
        fp8: the e4m3 flavour of its matrix hardware.
        memory_bytes: device memory, the slice's own for a partition; None if unknown.
        compute_units: SMs, CUs, Xe cores or physical cores; None if unknown.
        isa: instruction-set levels of a CPU as Linux spells them, "avx512_bf16".
        shared_memory_bytes: the most on-chip memory one workgroup (thread block) can have.
        memory_bandwidth_bytes_per_s: the datasheet's peak, for rooflines.
        index: the ordinal that torch gives the device; None if simulated.
        uuid: the driver's identifier, if known.
        is_simulated: the facts come from a table, not from a device that was asked.
        notes: what a reader should know about these facts, and their source.
    """

    vendor: Vendor
    name: str
    arch: str
    capability: DeviceCapability | None
    arch_family: str
    fp8: Fp8Format
    memory_bytes: int | None = None
    compute_units: int | None = None
    isa: tuple[str, ...] = ()
    shared_memory_bytes: int | None = None
    memory_bandwidth_bytes_per_s: int | None = None
    index: int | None = None
    uuid: str | None = None
    is_simulated: bool = False
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self._check_capability()
        for field in (
            "memory_bytes",
            "compute_units",
            "shared_memory_bytes",
            "memory_bandwidth_bytes_per_s",
        ):
            value = getattr(self, field)
            if value is not None and value <= 0:
                raise InvalidInputError.for_argument(field, value, "a positive integer or None")
        if self.index is not None and self.index < 0:
            raise InvalidInputError.for_argument("index", self.index, "an integer >= 0 or None")

    def _check_capability(self) -> None:
        expected = self.vendor if self.vendor in _NUMBERED_VENDORS else None
        actual = None if self.capability is None else self.capability.vendor
        if actual is not expected:
            allowed = "None" if expected is None else f"a DeviceCapability of vendor {expected}"
            raise InvalidInputError.for_argument(
                "capability", f"{self.capability!r} for vendor {self.vendor}", allowed
            )

    def __hash__(self) -> int:
        try:
            return self._hash
        except AttributeError:
            value = hash(tuple(getattr(self, field) for field in _FIELDS))
            object.__setattr__(self, "_hash", value)
            return value

    @property
    def fp8_dtype(self) -> torch.dtype | None:
        """The torch dtype of `fp8`; None without fp8 hardware."""
        return _FP8_DTYPES.get(self.fp8)

    @property
    def torch_device_type(self) -> str:
        """What torch calls such a device: "cuda" (NVIDIA and AMD), "xpu" or "cpu"."""
        return _TORCH_DEVICE_TYPES[self.vendor]

    def is_arch(self, *names: str) -> bool:
        """Whether `arch` is one of `names`, exactly: no prefix, no substring, no family."""
        return self.arch in names

    def has_isa(self, level: str) -> bool:
        """Whether the CPU has this instruction-set level, spelled as Linux does."""
        return level in self.isa

    def to_dict(self) -> dict[str, Any]:
        """Return the facts as JSON-safe values; the capability is [major, minor]."""
        record = {field: getattr(self, field) for field in _FIELDS}
        record["vendor"] = str(self.vendor)
        record["fp8"] = str(self.fp8)
        record["isa"] = list(self.isa)
        record["notes"] = list(self.notes)
        if self.capability is not None:
            record["capability"] = [self.capability.major, self.capability.minor]
        return record

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> DeviceFacts:
        """Return the facts that `to_dict` wrote.

        Raises:
            UnknownNameError: a key is no field, or the vendor or fp8 flavour has no such name.
            InvalidInputError: a required field is missing, or a value does not fit.
        """
        _check_keys(record)
        values = dict(record)
        vendor = values["vendor"] = _member(Vendor, "vendor", record["vendor"])
        values["fp8"] = _member(Fp8Format, "fp8 format", record["fp8"])
        if record["capability"] is not None:
            major, minor = record["capability"]
            values["capability"] = DeviceCapability(vendor=vendor, major=major, minor=minor)
        for field in ("isa", "notes"):
            values[field] = tuple(record.get(field, ()))
        return cls(**values)


_FIELDS = tuple(field.name for field in dataclasses.fields(DeviceFacts))
_REQUIRED_FIELDS = tuple(
    field.name for field in dataclasses.fields(DeviceFacts) if field.default is dataclasses.MISSING
)


def _check_keys(record: Mapping[str, Any]) -> None:
    for key in record:
        if key not in _FIELDS:
            raise UnknownNameError.for_name("field of DeviceFacts", key, _FIELDS)
    for field in _REQUIRED_FIELDS:
        if field not in record:
            needed = ", ".join(_REQUIRED_FIELDS)
            raise InvalidInputError.for_argument(field, "missing", f"a value for each of {needed}")


def _member(kind: type[_E], noun: str, value: object) -> _E:
    try:
        return kind(value)
    except ValueError:
        raise UnknownNameError.for_name(noun, value, [str(member) for member in kind]) from None
