"""Intel GPUs as the kernel lists them: the files of its graphics drivers, xe and i915.

They are plain files, so that reading them starts no runtime.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from attn_xpu.pci_ids import ARCHS, DATA_CENTER_IDS, DISCRETE_ARCHS, INTEL_VENDOR_ID, NAMES

__all__ = ["Card", "kind_of", "read_cards"]


def kind_of(device_id: int | None) -> str:
    """Say what kind of part a PCI number is: for a data center, a client's card, or integrated."""
    arch = None if device_id is None else ARCHS.get(device_id)
    if device_id in DATA_CENTER_IDS:
        return "a data-center GPU"
    if arch is None:
        return "a GPU of unknown kind"
    return "a client GPU, a card" if arch in DISCRETE_ARCHS else "a client GPU, integrated"


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One Intel GPU of the machine.

    Attributes:
        pci_address: "0000:03:00.0".
        device_id: the PCI device number.
        driver: "xe" or "i915"; "" if unknown.
        render_node: "renderD128", its node below /dev/dri.
        num_tiles: tiles (stacks) of a Data Center GPU Max; 1 elsewhere.
    """

    pci_address: str
    device_id: int
    driver: str
    render_node: str
    num_tiles: int = 1

    @property
    def arch(self) -> str | None:
        """The architecture's name; None where the PCI number is in no table here."""
        return ARCHS.get(self.device_id)

    @property
    def name(self) -> str:
        """The marketing name, or the PCI numbers."""
        return NAMES.get(self.device_id, f"Intel GPU {INTEL_VENDOR_ID:04x}:{self.device_id:04x}")

    @property
    def is_discrete(self) -> bool:
        """Whether it has memory of its own."""
        return self.arch in DISCRETE_ARCHS


def read_cards(sysfs: Path) -> tuple[Card, ...]:
    """Return the Intel GPUs in the order of their PCI addresses.

    Args:
        sysfs: the folder that stands for "/sys".
    """
    nodes = sorted((sysfs / "class/drm").glob("renderD[0-9]*"))
    cards = [card for card in map(_card, nodes) if card is not None]
    return tuple(sorted(cards, key=lambda card: card.pci_address))


def _card(node: Path) -> Card | None:
    device = node / "device"
    vendor_id, device_id = _hexadecimal(device / "vendor"), _hexadecimal(device / "device")
    if vendor_id != INTEL_VENDOR_ID or device_id is None:
        return None
    event = _uevent(device / "uevent")
    is_tiled = ARCHS.get(device_id) == "pvc"
    return Card(
        pci_address=event.get("PCI_SLOT_NAME", ""),
        device_id=device_id,
        driver=event.get("DRIVER", ""),
        render_node=node.name,
        num_tiles=_count_tiles(device) if is_tiled else 1,
    )


def _count_tiles(device: Path) -> int:
    """Count tiles: xe has a folder for each, i915 one for each "gt" (on this part, a tile)."""
    tiles = [*device.glob("tile[0-9]*")] or [*device.glob("drm/card*/gt/gt[0-9]*")]
    return len(tiles) or 1


def _uevent(path: Path) -> Mapping[str, str]:
    pairs = (line.partition("=") for line in _text(path).splitlines())
    return {name: value for name, equals, value in pairs if equals}


def _hexadecimal(path: Path) -> int | None:
    try:
        return int(_text(path), 16)
    except ValueError:
        return None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
