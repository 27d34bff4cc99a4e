"""The instruction sets that the kernels are built for, by the numbers of csrc/isa.h."""

from __future__ import annotations

from enum import IntEnum

__all__ = ["IsaLevel", "levels_of"]


class IsaLevel(IntEnum):
    """One build of the kernels. On one architecture the higher number is the faster."""

    GENERIC = 0
    """What the compiler makes for any processor of the architecture."""
    AVX2 = 1
    """With FMA and F16C."""
    AVX512 = 2
    """F, BW, DQ and VL."""
    AVX512_BF16 = 3
    AMX_BF16 = 4
    NEON = 5

    @property
    def label(self) -> str:
        """Its name in lower case, "avx512_bf16"."""
        return self.name.lower()


def levels_of(mask: int) -> tuple[IsaLevel, ...]:
    """Return the levels whose bits are set, the lowest first."""
    return tuple(level for level in IsaLevel if mask >> level & 1)
