"""What a device is, as plain data, so that any machine can be asked about from any machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

import torch

from attn_shared._fields import CachedHash
from attn_shared.arch import ARCH_FORMS, Arch, parse_arch
from attn_shared.errors import InvalidInputError, UnknownNameError
from attn_shared.presets import DATASHEETS, Datasheet
from attn_shared.vendor import DeviceCapability, Fp8Format, Vendor

__all__ = [
    "PRESETS",
    "Arch",
    "DeviceCapability",
    "DeviceFacts",
    "Fp8Format",
    "Vendor",
    "common_fp8_dtype",
    "device_from_arch",
    "parse_arch",
    "preset",
    "resolve_device",
]

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

_POSITIVE_FIELDS = (
    "memory_bytes",
    "compute_units",
    "shared_memory_bytes",
    "wave_size",
    "memory_bandwidth_bytes_per_s",
)

_IGNORED_IN_PRESETS = str.maketrans("", "", " -_")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts(CachedHash):
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
        wave_size: lanes that run together: a warp, a wavefront; None if unknown, or not fixed.
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
    wave_size: int | None = None
    memory_bandwidth_bytes_per_s: int | None = None
    index: int | None = None
    uuid: str | None = None
    is_simulated: bool = False
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self._check_capability()
        for field in _POSITIVE_FIELDS:
            _check_integer(field, getattr(self, field), lowest=1)
        _check_integer("index", self.index, lowest=0)
        for field in ("isa", "notes"):
            if not isinstance(getattr(self, field), tuple):
                raise InvalidInputError.for_argument(
                    field, repr(getattr(self, field)), "a tuple of strings"
                )

    def _check_capability(self) -> None:
        expected = self.vendor if self.vendor in _NUMBERED_VENDORS else None
        actual = None if self.capability is None else self.capability.vendor
        if actual != expected:
            allowed = "None" if expected is None else f"a DeviceCapability of vendor {expected}"
            raise InvalidInputError.for_argument(
                "capability", f"{self.capability!r} for vendor {self.vendor}", allowed
            )

    __hash__ = CachedHash.__hash__

    @property
    def fp8_dtype(self) -> torch.dtype | None:
        """The torch dtype of `fp8`; None without fp8 hardware."""
        return _FP8_DTYPES.get(self.fp8)

    @property
    def torch_device_type(self) -> str:
        """What torch calls such a device: "cuda" (NVIDIA and AMD), "xpu" or "cpu"."""
        return _TORCH_DEVICE_TYPES[self.vendor]

    def is_arch(self, *names: str) -> bool:
        """Whether `arch` is one of `names`, exactly: no prefix, no substring, no family.

        Raises:
            UnknownNameError: a name is no architecture's, so that a misspelt one is not False.
        """
        return any(parse_arch(name).canonical == self.arch for name in names)

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
        values["capability"] = _capability_from(vendor, record["capability"])
        for field in ("isa", "notes"):
            if isinstance(values.get(field), list):
                values[field] = tuple(values[field])
        return cls(**values)


_FIELDS = tuple(field.name for field in dataclasses.fields(DeviceFacts))
_REQUIRED_FIELDS = tuple(
    field.name for field in dataclasses.fields(DeviceFacts) if field.default is dataclasses.MISSING
)


def common_fp8_dtype(devices: Iterable[DeviceFacts]) -> torch.dtype | None:
    """Return the one e4m3 dtype of a group of devices; None where none of them has fp8.

    A cache has one flavour, and e4m3fn and e4m3fnuz read the same bits as other numbers.

    Raises:
        InvalidInputError: the devices differ; names each with its flavour.
    """
    group = tuple(devices)
    flavours = {device.fp8 for device in group}
    if len(flavours) <= 1:
        return group[0].fp8_dtype if group else None
    found = ", ".join(f"{_place(device)}: {device.fp8}" for device in group)
    raise InvalidInputError.for_argument(
        "fp8 flavours of the group",
        found,
        "one flavour for all, since a cache has one",
        hint="let a process see devices of one architecture, or take kv_cache_dtype=auto or "
        "fp8_e5m2.",
    )


def _place(device: DeviceFacts) -> str:
    return device.arch if device.index is None else f"device {device.index} ({device.arch})"


def device_from_arch(arch_text: str) -> DeviceFacts:
    """Return a simulated device of an architecture, its size and speed unknown.

    Raises:
        UnknownNameError: `parse_arch` reads no such form.
    """
    arch = parse_arch(arch_text)
    notes = ["stands for any device of this architecture"]
    if not arch.is_known:
        notes.append("the architecture is unknown: nothing is assumed of it")
    return _simulated(arch, name=f"any {arch.canonical}", notes=tuple(notes))


def _simulated(arch: Arch, *, name: str, **figures: Any) -> DeviceFacts:
    return DeviceFacts(
        vendor=arch.vendor,
        name=name,
        arch=arch.canonical,
        capability=arch.capability,
        arch_family=arch.family,
        fp8=arch.fp8,
        shared_memory_bytes=arch.shared_memory_bytes,
        wave_size=arch.wave_size,
        is_simulated=True,
        **figures,
    )


def _from_datasheet(sheet: Datasheet) -> DeviceFacts:
    return _simulated(
        parse_arch(sheet.arch),
        name=sheet.name,
        memory_bytes=sheet.memory_bytes,
        compute_units=sheet.compute_units,
        memory_bandwidth_bytes_per_s=sheet.memory_bandwidth_bytes_per_s,
        isa=sheet.isa,
        notes=(*sheet.notes, f"figures: {sheet.source}"),
    )


def preset(name: str) -> DeviceFacts:
    """Return the preset called `name`; case, spaces, "-" and "_" do not matter.

    Raises:
        UnknownNameError: there is none; the message suggests the nearest.
    """
    facts = _find_preset(name)
    if facts is None:
        raise UnknownNameError.for_name("device preset", name, PRESETS)
    return facts


def resolve_device(text: str) -> DeviceFacts:
    """Return the device that a user named: a preset, else any device of an architecture.

    Raises:
        UnknownNameError: it is neither; the message lists both.
    """
    facts = _find_preset(text)
    if facts is not None:
        return facts
    try:
        return device_from_arch(text)
    except UnknownNameError:
        raise UnknownNameError.for_name("device", text, [*PRESETS, *ARCH_FORMS]) from None


def _find_preset(name: str) -> DeviceFacts | None:
    if not isinstance(name, str):
        raise InvalidInputError.for_argument(
            "device", repr(name), "the name of a preset or an architecture"
        )
    return PRESETS.get(name.lower().translate(_IGNORED_IN_PRESETS))


def _check_integer(field: str, value: object, *, lowest: int) -> None:
    if value is None or (isinstance(value, int) and value >= lowest):
        return
    raise InvalidInputError.for_argument(field, repr(value), f"an integer >= {lowest} or None")


def _check_keys(record: Mapping[str, Any]) -> None:
    for key in record:
        if key not in _FIELDS:
            raise UnknownNameError.for_name("field of DeviceFacts", key, _FIELDS)
    for field in _REQUIRED_FIELDS:
        if field not in record:
            needed = ", ".join(_REQUIRED_FIELDS)
            raise InvalidInputError.for_argument(field, "missing", f"a value for each of {needed}")


def _member(kind: type[_E], noun: str, value: Any) -> _E:
    try:
        return kind(value)
    except ValueError:
        raise UnknownNameError.for_name(noun, value, [str(member) for member in kind]) from None


def _capability_from(vendor: Vendor, value: Any) -> DeviceCapability | None:
    match value:
        case None:
            return None
        case [int(major), int(minor)]:
            return DeviceCapability(vendor=vendor, major=major, minor=minor)
    raise InvalidInputError.for_argument("capability", repr(value), "[major, minor] or null")


PRESETS: Mapping[str, DeviceFacts] = MappingProxyType(
    {name: _from_datasheet(sheet) for name, sheet in DATASHEETS.items()}
)
"""Well-known devices by short name, all simulated."""
