"""Datasheet figures of well-known devices, so that any machine can be asked about anywhere.

A device is what torch counts as one: a die of an MI250 and a stack of a Max 1550 under their
drivers' defaults. Memory is the nominal size; a driver shows a few percent less. Vendors write GB
for what is 2**30 bytes of memory, and for 10**9 bytes of bandwidth. What follows from the
architecture (capability, fp8, shared memory) is not repeated here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

__all__ = ["DATASHEETS", "Datasheet"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Datasheet:
    """The figures of one device and where they stand.

    Attributes:
        name: the marketing name.
        arch: any form that `attn_shared.arch.parse_arch` reads.
        source: who published the figures.
        memory_gib: memory in GiB; None where the buyer decides.
        compute_units: SMs, CUs, Xe cores or physical cores; None where it varies.
        bandwidth_gb_per_s: peak memory bandwidth in 10**9 bytes per second.
        isa: instruction-set levels of a CPU.
        notes: what a reader should know.
    """

    name: str
    arch: str
    source: str
    memory_gib: int | None = None
    compute_units: int | None = None
    bandwidth_gb_per_s: float | None = None
    isa: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def memory_bytes(self) -> int | None:
        """Memory in bytes."""
        return None if self.memory_gib is None else self.memory_gib * 2**30

    @property
    def memory_bandwidth_bytes_per_s(self) -> int | None:
        """Peak memory bandwidth in bytes per second."""
        if self.bandwidth_gb_per_s is None:
            return None
        return round(self.bandwidth_gb_per_s * 10**9)


_AVX2 = ("avx2", "fma", "f16c")
_SAPPHIRE_RAPIDS = (
    *_AVX2,
    "avx512f",
    "avx512bw",
    "avx512dq",
    "avx512vl",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "amx_tile",
    "amx_bf16",
    "amx_int8",
)
_NEOVERSE_V2 = ("asimd", "asimdhp", "asimddp", "bf16", "i8mm", "sve", "sve2", "svebf16")

_SHARED_MEMORY = "the CPU and the GPU share this memory"

DATASHEETS: Mapping[str, Datasheet] = MappingProxyType(
    {
        "t4": Datasheet(
            name="NVIDIA T4",
            arch="sm_75",
            source="NVIDIA T4 datasheet",
            memory_gib=16,
            compute_units=40,
            bandwidth_gb_per_s=320,
        ),
        "a100": Datasheet(
            name="NVIDIA A100-SXM4-80GB",
            arch="sm_80",
            source="NVIDIA A100 datasheet and architecture white paper",
            memory_gib=80,
            compute_units=108,
            bandwidth_gb_per_s=2039,
        ),
        "l40s": Datasheet(
            name="NVIDIA L40S",
            arch="sm_89",
            source="NVIDIA L40S datasheet (18,176 CUDA cores, 128 an SM)",
            memory_gib=48,
            compute_units=142,
            bandwidth_gb_per_s=864,
        ),
        "rtx4090": Datasheet(
            name="NVIDIA GeForce RTX 4090",
            arch="sm_89",
            source="NVIDIA Ada architecture white paper",
            memory_gib=24,
            compute_units=128,
            bandwidth_gb_per_s=1008,
        ),
        "h100": Datasheet(
            name="NVIDIA H100 80GB HBM3",
            arch="sm_90",
            source="NVIDIA H100 datasheet (SXM) and architecture white paper",
            memory_gib=80,
            compute_units=132,
            bandwidth_gb_per_s=3350,
        ),
        "h200": Datasheet(
            name="NVIDIA H200",
            arch="sm_90",
            source="NVIDIA H200 datasheet (SXM)",
            memory_gib=141,
            compute_units=132,
            bandwidth_gb_per_s=4800,
        ),
        "b200": Datasheet(
            name="NVIDIA B200",
            arch="sm_100",
            source="NVIDIA DGX B200 datasheet, an eighth; SMs as CUDA reports them",
            memory_gib=180,
            compute_units=148,
            bandwidth_gb_per_s=8000,
        ),
        "b300": Datasheet(
            name="NVIDIA B300",
            arch="sm_103",
            source="NVIDIA Blackwell Ultra announcement",
            memory_gib=288,
            compute_units=148,
            bandwidth_gb_per_s=8000,
            notes=("148 SMs as on the B200; the full die has 160 and boards differ",),
        ),
        "rtx5090": Datasheet(
            name="NVIDIA GeForce RTX 5090",
            arch="sm_120",
            source="NVIDIA RTX Blackwell architecture white paper",
            memory_gib=32,
            compute_units=170,
            bandwidth_gb_per_s=1792,
        ),
        "gb10": Datasheet(
            name="NVIDIA GB10",
            arch="sm_121",
            source="NVIDIA DGX Spark datasheet (6,144 CUDA cores, 128 an SM)",
            memory_gib=128,
            compute_units=48,
            bandwidth_gb_per_s=273,
            notes=(_SHARED_MEMORY,),
        ),
        "thor": Datasheet(
            name="NVIDIA Jetson AGX Thor",
            arch="sm_110",
            source="NVIDIA Jetson T5000 datasheet (2,560 CUDA cores, 128 an SM)",
            memory_gib=128,
            compute_units=20,
            bandwidth_gb_per_s=273,
            notes=(_SHARED_MEMORY,),
        ),
        "mi250": Datasheet(
            name="AMD Instinct MI250",
            arch="gfx90a",
            source="AMD Instinct MI250 datasheet, halved",
            memory_gib=64,
            compute_units=104,
            bandwidth_gb_per_s=1638.4,
            notes=("one of the two dies (GCD) of the board: each is a device of its own",),
        ),
        "mi300x": Datasheet(
            name="AMD Instinct MI300X",
            arch="gfx942",
            source="AMD Instinct MI300X datasheet",
            memory_gib=192,
            compute_units=304,
            bandwidth_gb_per_s=5300,
        ),
        "mi325x": Datasheet(
            name="AMD Instinct MI325X",
            arch="gfx942",
            source="AMD Instinct MI325X datasheet",
            memory_gib=256,
            compute_units=304,
            bandwidth_gb_per_s=6000,
        ),
        "mi355x": Datasheet(
            name="AMD Instinct MI355X",
            arch="gfx950",
            source="AMD Instinct MI355X datasheet",
            memory_gib=288,
            compute_units=256,
            bandwidth_gb_per_s=8000,
        ),
        "rx7900xtx": Datasheet(
            name="AMD Radeon RX 7900 XTX",
            arch="gfx1100",
            source="AMD product page",
            memory_gib=24,
            compute_units=96,
            bandwidth_gb_per_s=960,
            notes=("torch counts workgroup processors, pairs of CUs: 48",),
        ),
        "rx9070xt": Datasheet(
            name="AMD Radeon RX 9070 XT",
            arch="gfx1201",
            source="AMD product page",
            memory_gib=16,
            compute_units=64,
            bandwidth_gb_per_s=640,
            notes=("torch counts workgroup processors, pairs of CUs: 32",),
        ),
        "strixhalo": Datasheet(
            name="AMD Radeon 8060S",
            arch="gfx1151",
            source="AMD Ryzen AI Max+ 395 product page",
            compute_units=40,
            bandwidth_gb_per_s=256,
            notes=(_SHARED_MEMORY, "torch counts workgroup processors, pairs of CUs: 20"),
        ),
        "max1550": Datasheet(
            name="Intel Data Center GPU Max 1550",
            arch="pvc",
            source="Intel product specifications, halved",
            memory_gib=64,
            compute_units=64,
            bandwidth_gb_per_s=1638.4,
            notes=("one of the two stacks of the card: each is a device of its own",),
        ),
        "b60": Datasheet(
            name="Intel Arc Pro B60",
            arch="bmg",
            source="Intel product specifications",
            memory_gib=24,
            compute_units=20,
            bandwidth_gb_per_s=456,
        ),
        "spr": Datasheet(
            name="Intel Xeon Platinum 8480+",
            arch="x86_64",
            source="Intel product specifications, one socket, 8 channels of DDR5-4800",
            compute_units=56,
            bandwidth_gb_per_s=307.2,
            isa=_SAPPHIRE_RAPIDS,
        ),
        "graviton4": Datasheet(
            name="AWS Graviton4",
            arch="aarch64",
            source="AWS announcement, one socket, 12 channels of DDR5-5600",
            compute_units=96,
            bandwidth_gb_per_s=537.6,
            isa=_NEOVERSE_V2,
        ),
        "genericcpu": Datasheet(
            name="generic x86-64-v3 CPU",
            arch="x86_64",
            source="x86-64 psABI, level 3",
            isa=_AVX2,
        ),
    }
)
"""Figures by preset name: lower-case letters and digits."""
