from __future__ import annotations

from attn_cpu._levels import IsaLevel, levels_of


def test_masks() -> None:
    assert levels_of(0) == ()
    assert levels_of(0b1) == (IsaLevel.GENERIC,)
    assert levels_of(0b10110) == (IsaLevel.AVX2, IsaLevel.AVX512, IsaLevel.AMX_BF16)


def test_labels() -> None:
    assert [level.label for level in IsaLevel] == [
        *("generic", "avx2", "avx512", "avx512_bf16", "amx_bf16", "neon")
    ]
