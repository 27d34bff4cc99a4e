"""Sets of sizes and of devices, as data that prints itself."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from attn_shared._fields import require_positive
from attn_shared.device import DeviceCapability, DeviceFacts, Vendor

__all__ = [
    "BlockSize",
    "DeviceLimit",
    "Exactly",
    "MultipleOf",
    "SizeSet",
    "admits_block",
    "describe_blocks",
    "describe_multiples",
]


@dataclass(frozen=True, slots=True)
class MultipleOf:
    """In a list of block sizes: every multiple of `base`."""

    base: int

    def __post_init__(self) -> None:
        """Refuse a base that has no multiples."""
        require_positive("MultipleOf.base", self.base)

    def __str__(self) -> str:
        """Read as "multiple of 16"."""
        return f"multiple of {self.base}"


@dataclass(frozen=True, slots=True)
class Exactly:
    """In a list of block sizes: this one, and none of its multiples."""

    size: int

    def __post_init__(self) -> None:
        """Refuse what is no size."""
        require_positive("Exactly.size", self.size)

    def __str__(self) -> str:
        """Read as "16"."""
        return str(self.size)


BlockSize = int | MultipleOf | Exactly
"""An entry of a list of block sizes. A plain number, a kernel's own block, admits multiples."""


def admits_block(entry: BlockSize, block_size: int) -> bool:
    """Whether an entry of a list of block sizes takes a block of so many tokens."""
    if isinstance(entry, Exactly):
        return block_size == entry.size
    return block_size % _base(entry) == 0


def describe_blocks(entries: Iterable[BlockSize]) -> str:
    """Return "16, 32" or "a multiple of 16": what the entries of a list of block sizes admit."""
    found = list(entries)
    parts = [str(size) for size in sorted(e.size for e in found if isinstance(e, Exactly))]
    bases = [_base(entry) for entry in found if not isinstance(entry, Exactly)]
    if bases:
        parts.append(describe_multiples(bases))
    return ", ".join(parts)


def _base(entry: int | MultipleOf) -> int:
    return entry.base if isinstance(entry, MultipleOf) else entry


def describe_multiples(bases: Iterable[int]) -> str:
    """Return "a multiple of 16 or 24", without bases that are multiples of smaller ones."""
    kept: list[int] = []
    for base in sorted(set(bases)):
        if all(base % smaller for smaller in kept):
            kept.append(base)
    return "any" if kept == [1] else f"a multiple of {' or '.join(map(str, kept))}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeSet:
    """A set of sizes: listed ones, or a range of multiples."""

    sizes: frozenset[int] | None = None
    minimum: int = 1
    maximum: int | None = None
    multiple_of: int = 1

    @classmethod
    def of(cls, *sizes: int) -> SizeSet:
        """Return the set of exactly these sizes."""
        return cls(sizes=frozenset(sizes))

    def __contains__(self, size: int) -> bool:
        """Whether `size` is in the set."""
        if self.sizes is not None:
            return size in self.sizes
        is_in_range = self.minimum <= size and (self.maximum is None or size <= self.maximum)
        return is_in_range and size % self.multiple_of == 0

    def __str__(self) -> str:
        """Read as "64, 128" or "8 to 256, a multiple of 8"."""
        if self.sizes is not None:
            return ", ".join(str(size) for size in sorted(self.sizes)) or "none"
        end = "or more" if self.maximum is None else f"to {self.maximum}"
        step = f", a multiple of {self.multiple_of}" if self.multiple_of > 1 else ""
        return f"{self.minimum} {end}{step}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLimit:
    """Devices of one vendor that a backend runs on; None is no limit of that kind.

    `at_least` and `below` order capabilities, `families` takes major numbers, `exact` takes whole
    capabilities and `archs` canonical names: separate predicates, never one number for all.
    """

    vendor: Vendor
    at_least: tuple[int, int] | None = None
    below: tuple[int, int] | None = None
    families: tuple[int, ...] | None = None
    exact: tuple[tuple[int, int], ...] | None = None
    archs: tuple[str, ...] | None = None
    isa: tuple[str, ...] = ()

    def admits(self, device: DeviceFacts) -> bool:
        """Whether the device fulfils every part of this limit."""
        return (
            device.vendor is self.vendor
            and (self.archs is None or device.arch in self.archs)
            and all(device.has_isa(level) for level in self.isa)
            and self._admits_capability(device.capability)
        )

    def _admits_capability(self, capability: DeviceCapability | None) -> bool:
        limits = (self.at_least, self.below, self.families, self.exact)
        if all(limit is None for limit in limits):
            return True
        if capability is None:
            return False
        return (
            (self.at_least is None or capability.at_least(*self.at_least))
            and (self.below is None or not capability.at_least(*self.below))
            and (self.families is None or any(capability.is_family(m) for m in self.families))
            and (self.exact is None or any(capability.is_exactly(*pair) for pair in self.exact))
        )

    def __str__(self) -> str:
        """Read as "nvidia >= 8.0"."""
        parts = [str(self.vendor)]
        if self.at_least is not None:
            parts.append(">= {}.{}".format(*self.at_least))
        if self.below is not None:
            parts.append("< {}.{}".format(*self.below))
        if self.families is not None:
            parts.append("family " + "/".join(f"{major}.x" for major in self.families))
        if self.exact is not None:
            parts.append("exactly " + "/".join("{}.{}".format(*pair) for pair in self.exact))
        if self.archs is not None:
            parts.append("/".join(self.archs))
        if self.isa:
            parts.append("with " + "+".join(self.isa))
        return " ".join(parts)
