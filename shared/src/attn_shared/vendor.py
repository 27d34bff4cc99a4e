"""Vendors, their capability numbers and the fp8 flavours of their hardware."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from attn_shared.errors import CapabilityComparisonError, InvalidInputError

__all__ = ["DeviceCapability", "Fp8Format", "Vendor"]

_FIRST_ENCODED_MAJOR = 30  # far above any major number, below the smallest number like 3.5 -> 35


class Vendor(StrEnum):
    """Who makes the device; CPU stands for every host processor."""

    NVIDIA = "nvidia"
    AMD = "amd"
    INTEL = "intel"
    CPU = "cpu"


class Fp8Format(StrEnum):
    """The e4m3 flavour that a device's matrix hardware reads; NONE where fp8 is software only."""

    NONE = "none"
    E4M3FN = "e4m3fn"
    E4M3FNUZ = "e4m3fnuz"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceCapability:
    """A vendor's (major, minor) number of an architecture.

    The numbers of two vendors share a range and mean different things, and several AMD parts
    share one number, so capabilities order only within a vendor, and never against a bare
    number or tuple. For AMD, prefer the name: `DeviceFacts.is_arch("gfx942", "gfx950")`.
    """

    vendor: Vendor
    major: int
    minor: int

    def __post_init__(self) -> None:
        for field, value in (("major", self.major), ("minor", self.minor)):
            if value < 0:
                raise InvalidInputError.for_argument(field, value, "an integer >= 0")

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"

    def __lt__(self, other: object) -> bool:
        return self._numbers < self._numbers_of(other)

    def __le__(self, other: object) -> bool:
        return self._numbers <= self._numbers_of(other)

    def __gt__(self, other: object) -> bool:
        return self._numbers > self._numbers_of(other)

    def __ge__(self, other: object) -> bool:
        return self._numbers >= self._numbers_of(other)

    @property
    def _numbers(self) -> tuple[int, int]:
        return self.major, self.minor

    def _numbers_of(self, other: object) -> tuple[int, int]:
        if isinstance(other, DeviceCapability) and other.vendor is self.vendor:
            return other._numbers
        raise CapabilityComparisonError(
            f"{self.vendor} capability {self} does not order against {other!r}; allowed: a "
            f"DeviceCapability of vendor {self.vendor}.",
            hint="compare the vendor first, then ask at_least, is_exactly or is_family.",
        )

    def at_least(self, major: int, minor: int = 0) -> bool:
        """Whether this is (major, minor) or a later number. Not a test of kinship: 12.0 passes 10.

        Raises:
            InvalidInputError: `major` is a number such as 90, which is written 9, 0 here.
        """
        _refuse_encoded(major)
        return self._numbers >= (major, minor)

    def is_exactly(self, major: int, minor: int) -> bool:
        """Whether this is (major, minor) and no other number.

        Raises:
            InvalidInputError: `major` is a number such as 90, which is written 9, 0 here.
        """
        _refuse_encoded(major)
        return self._numbers == (major, minor)

    def is_family(self, major: int) -> bool:
        """Whether the major number is `major`: 10.0 and 10.3 are of family 10, 12.1 is of 12.

        Raises:
            InvalidInputError: `major` is a number such as 100, which is family 10 here.
        """
        _refuse_encoded(major)
        return self.major == major


def _refuse_encoded(major: int) -> None:
    if major >= _FIRST_ENCODED_MAJOR:
        raise InvalidInputError.for_argument(
            "major",
            major,
            f"a major number below {_FIRST_ENCODED_MAJOR}",
            hint="capability 9.0 is (9, 0), not 90.",
        )
