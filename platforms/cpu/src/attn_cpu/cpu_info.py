"""What /proc/cpuinfo says of the processor: its model and its instruction sets."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

__all__ = ["CpuInfo", "best_isa", "isa_of_torch_capability", "parse_cpuinfo"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuInfo:
    """A processor, as far as its kernel describes it.

    Attributes:
        model: its name; "" where the text gives none.
        isa: the instruction sets of `ISA_LEVELS` that every CPU considered has, in that order.
    """

    model: str
    isa: tuple[str, ...]


# As Linux spells them (arch/x86/include/asm/cpufeatures.h, arch/arm64/kernel/cpuinfo.c,
# arch/s390/kernel/processor.c): what attention kernels can be built for, the older first.
ISA_LEVELS = (
    *("avx", "avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512dq", "avx512vl"),
    *("avx512_vnni", "avx512_bf16", "avx512_fp16"),
    *("amx_tile", "amx_int8", "amx_bf16", "amx_fp16"),
    *("asimd", "asimdhp", "asimddp", "bf16", "i8mm", "sve", "sve2", "svebf16", "sme"),
    *("vx", "vxe", "vxe2"),
)

# The registers of MIDR_EL1 that Linux prints: (implementer, part). Arm's cores are sold under the
# names of those who build with them, which the kernel does not know.
_ARM_CORES: Mapping[tuple[int, int], str] = MappingProxyType(
    {
        (0x41, 0xD08): "Arm Cortex-A72",
        (0x41, 0xD0B): "Arm Cortex-A76",
        (0x41, 0xD0C): "Arm Neoverse-N1",
        (0x41, 0xD40): "Arm Neoverse-V1",
        (0x41, 0xD49): "Arm Neoverse-N2",
        (0x41, 0xD4F): "Arm Neoverse-V2",
        (0x41, 0xD84): "Arm Neoverse-V3",
        (0x41, 0xD8E): "Arm Neoverse-N3",
        (0xC0, 0xAC3): "Ampere-1",
        (0xC0, 0xAC4): "Ampere-1a",
    }
)

_MODEL_KEYS = ("model name", "cpu model", "uarch", "cpu")
_FLAG_KEYS = ("flags", "features")

# torch's dispatcher asks for these (aten/src/ATen/native/DispatchStub.cpp); it may see more.
_TORCH_LEVELS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "AVX2": ("avx", "avx2", "fma", "f16c"),
        "AVX512": ("avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl"),
        "SVE128": ("asimd", "sve"),
        "SVE256": ("asimd", "sve"),
        "Z VECTOR": ("vx",),
    }
)

_BEST_ISA = (
    ("amx_bf16", "AMX"),
    ("avx512_bf16", "AVX-512 with bf16"),
    ("avx512f", "AVX-512"),
    ("avx2", "AVX2"),
    ("avx", "AVX"),
    ("sve2", "SVE2"),
    ("sve", "SVE"),
    ("asimd", "NEON"),
    ("vx", "z vector"),
)


def parse_cpuinfo(text: str, *, cpus: Collection[int] | None = None) -> CpuInfo:
    """Read the text of /proc/cpuinfo.

    Args:
        text: the whole file.
        cpus: logical CPUs to consider; None is all. Where cores differ (hybrid and big.LITTLE
            parts), an instruction set counts only if each of these has it.
    """
    blocks = [_parse_block(block) for block in re.split(r"\n\s*\n", text)]
    chosen = [block for block in blocks if _is_chosen(block, cpus)]
    return CpuInfo(model=_model_of([*chosen, *blocks]), isa=_common_isa(chosen, blocks))


def _parse_block(block: str) -> dict[str, str]:
    pairs = (line.partition(":") for line in block.splitlines())
    return {key.strip().lower(): value.strip() for key, colon, value in pairs if colon}


def _is_chosen(block: Mapping[str, str], cpus: Collection[int] | None) -> bool:
    number = block.get("processor", "")
    return number.isdecimal() and (cpus is None or int(number) in cpus)


def _common_isa(
    chosen: Iterable[Mapping[str, str]], blocks: Iterable[Mapping[str, str]]
) -> tuple[str, ...]:
    """Intersect the flags of the chosen CPUs; s390x states them once, in no CPU's block."""
    flags = [found for found in map(_flags_of, chosen) if found is not None]
    if not flags:
        flags = [found for found in map(_flags_of, blocks) if found is not None]
    common = frozenset.intersection(*flags) if flags else frozenset()
    return tuple(level for level in ISA_LEVELS if level in common)


def _flags_of(block: Mapping[str, str]) -> frozenset[str] | None:
    for key in _FLAG_KEYS:
        if key in block:
            return frozenset(block[key].split())
    return None


def _model_of(blocks: Iterable[Mapping[str, str]]) -> str:
    for block in blocks:
        name = next((block[key] for key in _MODEL_KEYS if block.get(key)), "") or _arm_core(block)
        if name:
            return name
    return ""


def _arm_core(block: Mapping[str, str]) -> str:
    try:
        key = int(block["cpu implementer"], 16), int(block["cpu part"], 16)
    except (KeyError, ValueError):
        return ""
    return _ARM_CORES.get(key, f"Arm core (implementer {key[0]:#04x}, part {key[1]:#05x})")


def isa_of_torch_capability(capability: str) -> tuple[str, ...]:
    """Return the least that torch's dispatch level implies, where there is no /proc/cpuinfo.

    Args:
        capability: what `torch.backends.cpu.get_cpu_capability()` returns.
    """
    return _TORCH_LEVELS.get(capability, ())


def best_isa(isa: Collection[str]) -> str:
    """Name the best level for attention in words, "AMX"; "scalar code" where there is none."""
    return next((words for level, words in _BEST_ISA if level in isa), "scalar code")
