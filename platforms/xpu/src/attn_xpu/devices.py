"""`DeviceFacts` of the Intel GPUs that this process sees: from the kernel, or from running torch.

Which devices torch shows: the tiles of all cards (cards, with ZE_FLAT_DEVICE_HIERARCHY=COMPOSITE),
filtered by ZE_AFFINITY_MASK; of these the cards with memory of their own, or the integrated GPUs if
there is no such card. Sources: the Level Zero programming guide, "Environment Variables"; torch's
c10/xpu/XPUFunctions.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from attn_shared.arch import UNKNOWN_FAMILY, Arch, parse_arch
from attn_shared.device import DeviceFacts, Fp8Format, Vendor
from attn_shared.torch_build import Runtime, is_running
from attn_shared.visible_devices import VisibleDevice, parse_visible_devices
from attn_xpu.drm import Card, kind_of
from attn_xpu.pci_ids import ARCHS

__all__ = ["Unit", "Visible", "facts_of", "find_visible", "runtime_version", "torch_devices"]

_SOURCE = "from the kernel (sysfs); memory, Xe cores and fp64 are known once torch.xpu runs"
_ORDER_UNKNOWN = (
    "which of this machine's unequal GPUs this is cannot be told before torch.xpu runs; set "
    "ZE_AFFINITY_MASK to one of them, or call torch.xpu.init()"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """What Level Zero counts as one device: a card or one tile of it.

    Attributes:
        card: the card.
        tile: the tile's number; None for the whole card.
    """

    card: Card
    tile: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Visible:
    """What this process sees.

    Attributes:
        devices: in torch's order, if that is known.
        cards: the cards that they are on.
        problem: what was wrong with ZE_AFFINITY_MASK; "" if nothing.
    """

    devices: tuple[DeviceFacts, ...]
    cards: tuple[Card, ...] = ()
    problem: str = ""


def torch_devices() -> tuple[DeviceFacts, ...] | None:
    """Return the devices as torch counts them if its XPU runtime is up, else None."""
    if not is_running(Runtime.XPU):
        return None
    count = torch.xpu.device_count()
    return tuple(_torch_device(torch.xpu.get_device_properties(i), i) for i in range(count))


def runtime_version() -> str | None:
    """Return the version of Intel's compute runtime if torch's XPU runtime is up, else None."""
    if not is_running(Runtime.XPU) or not torch.xpu.device_count():
        return None
    return str(torch.xpu.get_device_properties(0).driver_version)


def _torch_device(properties: Any, index: int) -> DeviceFacts:
    device_id = getattr(properties, "device_id", None)
    arch = _arch_of(device_id)
    has_fp64 = getattr(properties, "has_fp64", None)
    return DeviceFacts(
        vendor=Vendor.INTEL,
        name=properties.name,
        arch=arch.canonical,
        capability=None,
        arch_family=arch.family,
        fp8=arch.fp8,
        memory_bytes=properties.total_memory,
        compute_units=properties.gpu_subslice_count or None,
        shared_memory_bytes=arch.shared_memory_bytes,
        index=index,
        notes=(
            f"from torch, whose XPU runtime is up; driver {properties.driver_version}",
            kind_of(device_id),
            f"fp64: {_FP64[has_fp64]}",
        ),
    )


_FP64 = {True: "in hardware", False: "none", None: "this torch does not say"}


def _arch_of(device_id: int | None) -> Arch:
    """Return the architecture of a PCI number; one that is in no table is unknown, not guessed."""
    name = ARCHS.get(device_id) if device_id is not None else None
    if name is not None:
        return parse_arch(name)
    text = UNKNOWN_FAMILY if device_id is None else f"pci-{device_id:04x}"
    return Arch(vendor=Vendor.INTEL, canonical=text, fp8=Fp8Format.NONE)


def find_visible(cards: Sequence[Card], environ: Mapping[str, str]) -> Visible:
    """Return the facts of the devices that torch will show in this environment.

    Args:
        cards: all Intel GPUs of the machine.
        environ: for ZE_AFFINITY_MASK, ZE_FLAT_DEVICE_HIERARCHY and ONEAPI_DEVICE_SELECTOR, which
            are the runtime's own.
    """
    is_composite = environ.get("ZE_FLAT_DEVICE_HIERARCHY") == "COMPOSITE"
    units = _units(cards, is_composite)
    chosen, problem = _mask(units, environ.get("ZE_AFFINITY_MASK"), is_composite)
    shown = [unit for unit in chosen if unit.card.is_discrete] or chosen
    # A mask counts all devices in the driver's order; without one only those shown matter.
    compared = shown if environ.get("ZE_AFFINITY_MASK") is None else units
    notes, is_known = _notes(compared, environ)
    devices = tuple(
        facts_of(unit, index=index if is_known else None, notes=notes)
        for index, unit in enumerate(shown)
    )
    return Visible(devices=devices, cards=tuple(unit.card for unit in shown), problem=problem)


def _units(cards: Sequence[Card], is_composite: bool) -> list[Unit]:
    return [
        Unit(card=card, tile=tile)
        for card in cards
        for tile in ([None] if is_composite or card.num_tiles == 1 else range(card.num_tiles))
    ]


def _mask(units: Sequence[Unit], value: str | None, is_composite: bool) -> tuple[list[Unit], str]:
    """Apply ZE_AFFINITY_MASK: it filters and leaves the order; an empty one filters nothing.

    An entry that names nothing is passed over, and told.
    """
    visible = parse_visible_devices(value, repeats_allowed=True)
    if visible is None or not value:
        return list(units), ""
    problems = [visible.problem] if visible.problem else []
    named = {entry: _find(units, entry, is_composite) for entry in visible}
    problems += [
        f"{entry.value!r} names no device of this machine"
        for entry, unit in named.items()
        if unit is None
    ]
    chosen = [unit for unit in named.values() if unit is not None]
    kept = [_kept(unit, chosen) for unit in units]
    return [unit for unit in kept if unit is not None], "; ".join(problems)


def _find(units: Sequence[Unit], entry: VisibleDevice, is_composite: bool) -> Unit | None:
    if entry.ordinal is None or entry.ordinal >= len(units):
        return None
    unit = units[entry.ordinal]
    if not entry.sub_devices:
        return unit
    tile = entry.sub_devices[0]
    is_tile = is_composite and tile < unit.card.num_tiles
    return Unit(card=unit.card, tile=tile) if is_tile else None


def _kept(unit: Unit, chosen: Sequence[Unit]) -> Unit | None:
    """Return what the mask leaves of a unit: all (for several tiles, too), one tile, or nothing."""
    if unit in chosen:
        return unit
    tiles = [part for part in chosen if part.card == unit.card and unit.tile is None]
    if len(tiles) == 1 and unit.card.num_tiles > 1:
        return tiles[0]
    return unit if tiles else None


def _notes(compared: Sequence[Unit], environ: Mapping[str, str]) -> tuple[tuple[str, ...], bool]:
    """Return notes for every device, and whether torch's numbers are known."""
    kinds = {(unit.card.device_id, unit.tile is None) for unit in compared}
    selector = environ.get("ONEAPI_DEVICE_SELECTOR")
    notes = [_SOURCE]
    if len(kinds) > 1:
        notes.append(_ORDER_UNKNOWN)
    if selector:
        notes.append(f"ONEAPI_DEVICE_SELECTOR={selector!r} filters further, once torch.xpu runs")
    return tuple(notes), len(kinds) <= 1 and not selector


def facts_of(unit: Unit, *, index: int | None, notes: tuple[str, ...] = ()) -> DeviceFacts:
    """Return a card or tile as selection sees it; `index` is torch's number, None if unknown."""
    card = unit.card
    arch = _arch_of(card.device_id)
    if card.arch is None:
        notes = (*notes, f"PCI number {card.device_id:04x} is of no architecture known here")
    notes = (*notes, kind_of(card.device_id))
    if unit.tile is not None:
        notes = (*notes, f"tile {unit.tile} of {card.num_tiles} of the card {card.pci_address}")
    return DeviceFacts(
        vendor=Vendor.INTEL,
        name=card.name,
        arch=arch.canonical,
        capability=None,
        arch_family=arch.family,
        fp8=arch.fp8,
        shared_memory_bytes=arch.shared_memory_bytes,
        index=index,
        notes=notes,
    )
