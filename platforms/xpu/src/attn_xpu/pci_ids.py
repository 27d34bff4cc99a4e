"""Intel GPUs by their PCI number.

Architectures: the kernel's include/drm/intel/pciids.h, Xe and later. Names: Intel's product pages,
for boards whose number stands for one product.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

__all__ = ["ARCHS", "DATA_CENTER_IDS", "DISCRETE_ARCHS", "INTEL_VENDOR_ID", "NAMES"]

INTEL_VENDOR_ID = 0x8086

DISCRETE_ARCHS = frozenset({"dg2", "pvc", "bmg", "cri"})
"""Architectures of cards with memory of their own; the others share the host's."""

_IDS: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {
        "dg2": (
            *(*range(0x5690, 0x5698), *range(0x56A0, 0x56A7), *range(0x56B0, 0x56B4)),
            *(*range(0x56BA, 0x56C0), *range(0x56C0, 0x56C3)),
        ),
        "pvc": (0x0B69, 0x0B6E, *range(0x0BD4, 0x0BDC), 0x0BE0, 0x0BE1, 0x0BE5),
        "mtl": (0x7D40, 0x7D45, 0x7D55, 0x7D60, 0x7DD5),
        "arl-h": (0x7D51, 0x7DD1),
        "arl-u": (0x7D41,),
        "arl-s": (0x7D67, 0xB640),
        "lnl": (0x6420, 0x64A0, 0x64B0),
        "bmg": (
            *(0xE202, 0xE209, *range(0xE20B, 0xE20E), *range(0xE210, 0xE213)),
            *(0xE215, 0xE216, *range(0xE220, 0xE224)),
        ),
        "ptl": (*range(0xB080, 0xB088), 0xB08F, 0xB090, 0xB0A0, 0xB0B0),
        "wcl": (0xFD80, 0xFD81),
        "nvl-s": (*range(0xD740, 0xD744), 0xD745, 0xD74A, 0xD74B),
        "nvl-p": (*range(0xD750, 0xD758), 0xD75F),
        "cri": (*range(0x674C, 0x6751),),
    }
)

ARCHS: Mapping[int, str] = MappingProxyType(
    {number: arch for arch, numbers in _IDS.items() for number in numbers}
)
"""Architecture, as `attn_shared.arch.parse_arch` reads it, by PCI device number."""

DATA_CENTER_IDS = frozenset({*_IDS["pvc"], *_IDS["cri"], *range(0x56C0, 0x56C3)})
"""PCI device numbers of data-center parts: Max, Crescent Island, and the Flex series, whose
architecture is that of the Arc A cards. All others are for clients, workstations included."""

NAMES: Mapping[int, str] = MappingProxyType(
    {
        0x0BD5: "Intel Data Center GPU Max 1550",
        0x0BDA: "Intel Data Center GPU Max 1100",
        0x56A0: "Intel Arc A770",
        0x56A1: "Intel Arc A750",
        0x56A2: "Intel Arc A580",
        0x56A5: "Intel Arc A380",
        0x56C0: "Intel Data Center GPU Flex 170",
        0x56C1: "Intel Data Center GPU Flex 140",
        0xE20B: "Intel Arc B580",
        0xE20C: "Intel Arc B570",
        0xE211: "Intel Arc Pro B60",
        0xE212: "Intel Arc Pro B50",
    }
)
"""Marketing name by PCI device number."""
