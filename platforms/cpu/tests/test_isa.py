"""Detection by masked flags, and forcing a level."""

from __future__ import annotations

import platform

import pytest
import torch
from attn_cpu_testing import attention_arguments, levels, needs_kernels, run

from attn_cpu._vendor.attn_cpu_kernels import load
from attn_cpu.isa import (
    BEST,
    IsaLevel,
    built_levels,
    forced,
    forced_level,
    level_named,
    supported_levels,
)
from attn_cpu.platform import CpuPlatform
from attn_shared.errors import InvalidInputError, UnknownNameError

needs_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="x86 flags")

# The bits of csrc/isa.h.
AVX2, FMA, F16C, AVX512, AVX512_BF16, AMX_TILE, AMX_BF16, YMM, ZMM, TILES = (
    1 << bit for bit in range(10)
)
VBMI = 1 << 11
ALL = (1 << 10) - 1 | VBMI
X86 = ("generic", "avx2", "avx512", "avx512_bf16", "amx_bf16")

MASKED = [
    (ALL, X86),
    (0, X86[:1]),
    (ALL & ~AVX2, X86[:1]),
    (ALL & ~FMA, X86[:1]),
    (ALL & ~F16C, X86[:1]),
    (ALL & ~YMM, X86[:1]),
    (ALL & ~AVX512, X86[:2]),
    (ALL & ~ZMM, X86[:2]),
    (ALL & ~AVX512_BF16, X86[:3]),
    (ALL & ~VBMI, X86[:4]),
    (ALL & ~AMX_TILE, X86[:4]),
    (ALL & ~AMX_BF16, X86[:4]),
    (ALL & ~TILES, X86[:4]),
    (AVX2 | FMA | F16C | YMM, X86[:2]),
    (AVX2 | FMA | F16C | YMM | AVX512 | ZMM, X86[:3]),
    # What a CPU has is of no use where its system does not save the registers.
    (AVX2 | FMA | F16C | AVX512 | AVX512_BF16 | AMX_TILE | AMX_BF16, X86[:1]),
]


@needs_kernels
@needs_x86
@pytest.mark.parametrize(("features", "expected"), MASKED)
def test_levels_follow_from_flags(features: int, expected: tuple[str, ...]) -> None:
    load()
    mask = torch.ops.attn_cpu.isa_supported(features)
    names = [level.label for level in IsaLevel if mask >> level & 1]
    built = {level.label for level in built_levels()}
    assert names == [name for name in expected if name in built]


@needs_kernels
@needs_x86
def test_the_processor_says_what_linux_says_of_it() -> None:
    isa = set(CpuPlatform().device().isa)
    wanted = {
        IsaLevel.AVX2: {"avx2", "fma", "f16c"},
        IsaLevel.AVX512: {"avx512f", "avx512bw", "avx512dq", "avx512vl"},
        IsaLevel.AVX512_BF16: {"avx512f", "avx512_bf16"},
        IsaLevel.AMX_BF16: {"amx_tile", "amx_bf16", "avx512_bf16"},
    }
    found = supported_levels()
    for level, flags in wanted.items():
        if level in built_levels():
            assert (level in found) == (flags <= isa)


@needs_kernels
@pytest.mark.parametrize("level", levels())
def test_each_level_answers(level: str) -> None:
    expected = run(attention_arguments(isa=IsaLevel.GENERIC))
    assert torch.allclose(
        run(attention_arguments(isa=level_named(level))), expected, rtol=1e-5, atol=1e-6
    )


@needs_kernels
def test_forced_holds_inside_and_nests() -> None:
    assert forced_level() == BEST
    with forced("generic") as level:
        assert level is IsaLevel.GENERIC
        with forced(supported_levels()[-1]):
            assert forced_level() == supported_levels()[-1]
        assert forced_level() == IsaLevel.GENERIC
    assert forced_level() == BEST


def test_a_level_that_is_none() -> None:
    assert level_named("avx512") is IsaLevel.AVX512
    with pytest.raises(UnknownNameError, match=r"unknown isa level 'avx3'.*avx2"):
        level_named("avx3")


@needs_kernels
@needs_x86
def test_a_level_of_another_processor_is_refused_by_both() -> None:
    words = r"isa is neon; allowed: generic.*on this CPU"
    with pytest.raises(InvalidInputError, match=words), forced("neon"):
        pass
    with pytest.raises(RuntimeError, match="isa"):
        run(attention_arguments(isa=IsaLevel.NEON))
    with pytest.raises(RuntimeError, match="isa"):
        run(attention_arguments(isa=99))
