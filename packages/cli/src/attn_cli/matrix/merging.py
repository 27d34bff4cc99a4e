"""Devices whose answers are equal, taken together, and what such a group is called."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from attn_cli.matrix.survey import AskedDevice, Matrix, Sheet
from attn_shared.device import PRESETS, Vendor

__all__ = ["VENDOR_NAMES", "Column", "columns", "columns_of_all", "grouped", "place"]

VENDOR_NAMES = {
    Vendor.NVIDIA: "NVIDIA",
    Vendor.AMD: "AMD",
    Vendor.INTEL: "Intel",
    Vendor.CPU: "CPU",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """Devices on which a backend answers alike.

    Attributes:
        sheets: one per device, equal in all that is looked at.
    """

    sheets: tuple[Sheet, ...]

    @property
    def sheet(self) -> Sheet:
        """Any one of them."""
        return self.sheets[0]

    @property
    def devices(self) -> tuple[AskedDevice, ...]:
        """The devices, in the order that they were asked in."""
        return tuple(sheet.device for sheet in self.sheets)


def columns(sheets: Iterable[Sheet]) -> list[Column]:
    """Return a backend's columns: devices whose sheets are equal in everything."""
    return grouped(sheets, lambda sheet: sheet.essence)


def columns_of_all(matrix: Matrix, *, base_only: bool = True) -> list[tuple[AskedDevice, ...]]:
    """Return devices of one vendor together on which every backend answers alike.

    Args:
        matrix: whose.
        base_only: look at the plain request alone, and whether such hardware was run.
    """
    found: dict[Hashable, list[AskedDevice]] = {}
    for index, device in enumerate(matrix.devices):
        sheets = [sheets[index] for sheets in matrix.sheets.values()]
        seen = [(s.base.essence, s.is_run) if base_only else s.essence for s in sheets]
        found.setdefault((device.facts.vendor, *seen), []).append(device)
    return [tuple(devices) for devices in found.values()]


def grouped(sheets: Iterable[Sheet], key: Callable[[Sheet], Hashable]) -> list[Column]:
    """Return sheets of equal keys together, in the order of the first of each."""
    found: dict[Hashable, list[Sheet]] = {}
    for sheet in sheets:
        found.setdefault(key(sheet), []).append(sheet)
    return [Column(sheets=tuple(members)) for members in found.values()]


def place(devices: Sequence[AskedDevice], asked: Sequence[AskedDevice]) -> str:
    """Return what a group of devices is called, as shortly as is true.

    A vendor's or a family's name stands for all of its presets, so that it is used only where all
    of them were asked.

    Args:
        devices: the group.
        asked: all devices of the matrix.
    """
    everything = [
        *(AskedDevice(name=name, facts=facts) for name, facts in PRESETS.items()),
        *(device for device in asked if device.name not in PRESETS),
    ]
    if len(devices) == len(asked) > 1 and len(asked) >= len(everything):
        return "every device"
    parts = [_of_vendor(vendor, devices, asked, everything) for vendor in Vendor]
    return "; ".join(part for part in parts if part)


def _of_vendor(
    vendor: Vendor,
    devices: Sequence[AskedDevice],
    asked: Sequence[AskedDevice],
    everything: Sequence[AskedDevice],
) -> str:
    inside, possible, whole = (
        [device for device in some if device.facts.vendor is vendor]
        for some in (devices, asked, everything)
    )
    if not inside:
        return ""
    if not any(device.name in PRESETS for device in inside):
        return ", ".join(device.name for device in inside)
    name = VENDOR_NAMES[vendor]
    if not _names(possible) >= _names(whole):
        return f"{name} {', '.join(device.name for device in inside)}"
    outside = [device for device in whole if device.name not in _names(inside)]
    if not outside:
        return name
    listed, left_out = list(_shortest(inside, whole)), list(_shortest(outside, whole))
    if len(left_out) < len(listed):
        return f"{name} except {', '.join(left_out)}"
    return f"{name} {', '.join(listed)}"


def _shortest(inside: Sequence[AskedDevice], whole: Sequence[AskedDevice]) -> Iterator[str]:
    """Yield families that are wholly inside, else architectures, else devices."""
    left = {device.name: device for device in inside}
    for kind in (_family, _arch):
        for value in dict.fromkeys(map(kind, left.values())):
            members = [device.name for device in whole if kind(device) == value]
            if all(name in left for name in members):
                yield value
                for name in members:
                    del left[name]
    yield from left


def _family(device: AskedDevice) -> str:
    return device.facts.arch_family


def _arch(device: AskedDevice) -> str:
    return device.facts.arch


def _names(devices: Iterable[AskedDevice]) -> set[str]:
    return {device.name for device in devices}
