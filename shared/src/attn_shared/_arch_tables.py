"""What is known of each architecture.

Sources: NVIDIA's CUDA programming guide, "Compute Capabilities" (13.4); LLVM's AMDGPU user guide
and the ISA table of ROCm's comgr; the target list of Intel's DPC++ compiler.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from attn_shared.vendor import Fp8Format

__all__ = [
    "AMD",
    "AMD_WAVE64",
    "CPU",
    "CPU_ALIASES",
    "INTEL",
    "INTEL_ALIASES",
    "INTEL_FAMILIES",
    "NVIDIA",
    "NVIDIA_FIRST_FP8",
    "NVIDIA_FIRST_SUFFIX",
    "NVIDIA_WARP",
    "ArchTraits",
]


@dataclass(frozen=True, slots=True)
class ArchTraits:
    """What a table says of one architecture: a block's most shared memory, its fp8 flavour."""

    family: str
    shared_memory_bytes: int | None = None
    fp8: Fp8Format = Fp8Format.NONE


_KIB = 1024

# The most a block gets after opting in. 8.8 has no column in the guide. 10.1 is what toolkits
# before 13.0 called 11.0.
NVIDIA: Mapping[tuple[int, int], ArchTraits] = MappingProxyType(
    {
        **dict.fromkeys([(5, 0), (5, 2), (5, 3)], ArchTraits("maxwell", 48 * _KIB)),
        **dict.fromkeys([(6, 0), (6, 1), (6, 2)], ArchTraits("pascal", 48 * _KIB)),
        **dict.fromkeys([(7, 0), (7, 2)], ArchTraits("volta", 96 * _KIB)),
        (7, 5): ArchTraits("turing", 64 * _KIB),
        **dict.fromkeys([(8, 0), (8, 7)], ArchTraits("ampere", 163 * _KIB)),
        (8, 6): ArchTraits("ampere", 99 * _KIB),
        (8, 8): ArchTraits("ampere"),
        (8, 9): ArchTraits("ada", 99 * _KIB),
        (9, 0): ArchTraits("hopper", 227 * _KIB),
        **dict.fromkeys([(10, 0), (10, 3)], ArchTraits("blackwell", 227 * _KIB)),
        (10, 7): ArchTraits("rubin", 327 * _KIB),
        **dict.fromkeys([(10, 1), (11, 0)], ArchTraits("blackwell-thor", 227 * _KIB)),
        **dict.fromkeys([(12, 0), (12, 1)], ArchTraits("blackwell-consumer", 99 * _KIB)),
    }
)
NVIDIA_FIRST_FP8 = (8, 9)  # PTX keeps what it has, so this holds for unknown later ones too
NVIDIA_FIRST_SUFFIX = MappingProxyType({"": (0, 0), "a": (9, 0), "f": (10, 0)})
NVIDIA_WARP = 32

_CDNA3 = ArchTraits("cdna3", 64 * _KIB, Fp8Format.E4M3FNUZ)
_CDNA5 = ArchTraits("cdna5", 320 * _KIB, Fp8Format.E4M3FN)
_GCN5 = ArchTraits("gcn5", 64 * _KIB)
_RDNA1 = ArchTraits("rdna1", 64 * _KIB)
_RDNA2 = ArchTraits("rdna2", 64 * _KIB)
_RDNA3 = ArchTraits("rdna3", 64 * _KIB)
_RDNA3_5 = ArchTraits("rdna3.5", 64 * _KIB)
_RDNA4 = ArchTraits("rdna4", 64 * _KIB, Fp8Format.E4M3FN)

# gfx125x is the MI400 series: wave32 and WMMA like RDNA 4, yet AMD's CDNA 5.
AMD: Mapping[str, ArchTraits] = MappingProxyType(
    {
        **dict.fromkeys(["gfx900", "gfx902", "gfx904", "gfx906", "gfx909", "gfx90c"], _GCN5),
        "gfx908": ArchTraits("cdna1", 64 * _KIB),
        "gfx90a": ArchTraits("cdna2", 64 * _KIB),
        **dict.fromkeys(["gfx940", "gfx941", "gfx942"], _CDNA3),
        "gfx950": ArchTraits("cdna4", 160 * _KIB, Fp8Format.E4M3FN),
        **dict.fromkeys(["gfx1010", "gfx1011", "gfx1012", "gfx1013"], _RDNA1),
        **dict.fromkeys(
            ["gfx1030", "gfx1031", "gfx1032", "gfx1033", "gfx1034", "gfx1035", "gfx1036"], _RDNA2
        ),
        **dict.fromkeys(["gfx1100", "gfx1101", "gfx1102", "gfx1103"], _RDNA3),
        **dict.fromkeys(["gfx1150", "gfx1151", "gfx1152", "gfx1153"], _RDNA3_5),
        **dict.fromkeys(["gfx1200", "gfx1201"], _RDNA4),
        **dict.fromkeys(["gfx1250", "gfx1251"], _CDNA5),
        # Generic targets offer what all their members share. gfx942 and gfx950 read different
        # fp8 flavours, so gfx9-4-generic has no fp8 instruction (LLVM says the same).
        "gfx9-generic": _GCN5,
        "gfx9-4-generic": ArchTraits("cdna3", 64 * _KIB),
        "gfx10-1-generic": _RDNA1,
        "gfx10-3-generic": _RDNA2,
        "gfx11-generic": _RDNA3,
        "gfx12-generic": _RDNA4,
        "gfx12-5-generic": _CDNA5,
    }
)

# Families whose waves have 64 lanes; those of the other known ones have 32 (LLVM's user guide).
AMD_WAVE64 = frozenset({"gcn5", "cdna1", "cdna2", "cdna3", "cdna4"})

# No fp8 in the matrix engines up to Xe3: Intel's libraries convert in software. Xe3P brings it
# (DPC++'s fp8 extension, whose first target is cri). Local memory as torch reports it on the
# Max 1550 and the Arc Pro B60; 64 KiB for Xe-HPG from oneAPI's occupancy calculator.
INTEL: Mapping[str, ArchTraits] = MappingProxyType(
    {
        "pvc": ArchTraits("xe-hpc", 128 * _KIB),
        "pvc-vg": ArchTraits("xe-hpc", 128 * _KIB),
        "dg2": ArchTraits("xe-hpg", 64 * _KIB),
        **dict.fromkeys(["mtl", "arl-u", "arl-s"], ArchTraits("xe-lpg")),
        "arl-h": ArchTraits("xe-lpg-plus"),
        **dict.fromkeys(["bmg", "lnl"], ArchTraits("xe2", 128 * _KIB)),
        **dict.fromkeys(["ptl", "wcl", "nvl-s", "nvl-u"], ArchTraits("xe3")),
        "nvl-p": ArchTraits("xe3p"),
        "cri": ArchTraits("xe3p", None, Fp8Format.E4M3FN),
    }
)
INTEL_FAMILIES = frozenset(traits.family for traits in INTEL.values())
INTEL_ALIASES: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(
            ["acm", "acm-g10", "acm-g11", "acm-g12", "dg2-g10", "dg2-g11", "dg2-g12"], "dg2"
        ),
        **dict.fromkeys(["mtl-u", "mtl-s", "mtl-h"], "mtl"),
        **dict.fromkeys(["bmg-g21", "bmg-g31"], "bmg"),
        **dict.fromkeys(["ptl-h", "ptl-u"], "ptl"),
        "lnl-m": "lnl",
        "xe2-hpg": "xe2",
        "xe2-lpg": "xe2",
    }
)

CPU: Mapping[str, str] = MappingProxyType(
    {
        "x86_64": "x86",
        "aarch64": "arm",
        "ppc64le": "power",
        "s390x": "z",
        "riscv64": "riscv",
        "loongarch64": "loongarch",
    }
)
CPU_ALIASES = MappingProxyType({"amd64": "x86_64", "x86-64": "x86_64", "arm64": "aarch64"})
