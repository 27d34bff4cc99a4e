"""Batches with long prompts, for the interpreter and, with more of them, for a GPU."""

from __future__ import annotations

from dataclasses import replace

import torch

from attn_conformance.case import Case
from attn_shared.dtypes import KVCacheLayout
from attn_shared.request import AttentionType

__all__ = ["hopper_cases", "large_cases", "prompt_cases"]

_WHOLE = Case(
    name="whole prompts",
    query_lens=(130, 64, 1),
    seq_lens=(130, 64, 1),
    num_heads=2,
    num_kv_heads=1,
    head_size=64,
    dtype=torch.bfloat16,
    block_size=16,
    nan_tail=True,
    num_padding_rows=3,
)
_MIXED = replace(
    _WHOLE,
    name="decodes, chunks and whole prompts over small pages",
    query_lens=(1, 70, 66, 2),
    seq_lens=(90, 201, 66, 40),
)


def large_cases() -> tuple[Case, ...]:
    """Return cases of several waves of a GPU's programs, in one copy and in pages."""
    many = replace(
        _MIXED,
        name="several waves",
        query_lens=(1, 700, 600, 3),
        seq_lens=(90, 1400, 600, 400),
        num_heads=32,
        num_kv_heads=8,
        head_size=128,
    )
    return (
        many,
        replace(many, name="several waves over large pages", block_size=64),
        replace(many, name="several waves of a window", block_size=64, window=(100, 0)),
        replace(many, name="several waves of whole prompts", seq_lens=(1, 700, 600, 3)),
        replace(many, name="several waves of 256", head_size=256),
    )


def prompt_cases() -> tuple[Case, ...]:
    """Return cases that cover where keys are read, and each feature of the kernel."""
    tiles = replace(_MIXED, name="pages of whole tiles", block_size=64)
    return (
        _WHOLE,
        _MIXED,
        tiles,
        replace(_WHOLE, name="stored keys alone", writes=False, block_size=64),
        replace(_MIXED, name="stored keys alone, copied", writes=False),
        replace(tiles, name="heads apart", layout=KVCacheLayout.HND, num_heads=4, num_kv_heads=2),
        replace(_MIXED, name="heads apart, copied", layout=KVCacheLayout.HND, num_kv_heads=2),
        replace(tiles, name="padded blocks", block_padding=64),
        replace(tiles, name="window", window=(40, 0)),
        replace(_MIXED, name="window over two stretches", window=(100, 0)),
        replace(tiles, name="chunks", chunk_size=48),
        replace(tiles, name="two-sided window", causal=False, window=(30, 20)),
        replace(tiles, name="without a mask", causal=False),
        replace(tiles, name="causal by request", causal=(True, False, True, False)),
        replace(tiles, name="sinks and softcap", has_sinks=True, softcap=5.0),
        replace(_MIXED, name="a cap far above all logits", softcap=30.0),
        replace(tiles, name="a cap far above logits near 0", softcap=50.0, query_factor=0.01),
        replace(_WHOLE, name="float16", dtype=torch.float16),
        replace(_WHOLE, name="padded requests", query_lens=(70, 66), seq_lens=(70, 0)),
        replace(_WHOLE, name="few programs", head_size=128),
        replace(_MIXED, name="many programs", head_size=128, num_heads=8, num_kv_heads=2),
        replace(_MIXED, name="widths that differ", head_size=128, head_size_v=64),
        replace(
            _MIXED, name="fp8 cache", kv_cache_dtype="fp8", k_scale=0.5, v_scale=2.0, nan_tail=False
        ),
        replace(tiles, name="upper bounds on the host", seq_lens_slack=70),
        replace(tiles, name="batch invariant", batch_invariant=True),
        replace(
            _WHOLE,
            name="encoder",
            attn_type=AttentionType.ENCODER_ONLY,
            query_lens=(130, 40),
            seq_lens=(130, 40),
        ),
        replace(
            tiles,
            name="cross-attention",
            attn_type=AttentionType.ENCODER_DECODER,
            query_lens=(70, 3),
            seq_lens=(100, 65),
        ),
        replace(
            _MIXED,
            name="cross-attention, copied",
            attn_type=AttentionType.ENCODER_DECODER,
            query_lens=(70, 3, 65),
            seq_lens=(300, 65, 70),
        ),
    )


def hopper_cases() -> tuple[Case, ...]:
    """Return those that the kernel for Hopper serves, in the widths of heads that it does."""
    served = [
        case
        for case in prompt_cases()
        if case.head_size == 64
        and case.window == (None, None)
        and not case.chunk_size
        and case.softcap is None
    ]
    return tuple(
        replace(case, name=f"{case.name}, {size}", head_size=size, head_size_v=size)
        for case in served
        for size in (128, 256)
    )
