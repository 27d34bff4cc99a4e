"""Caches of bytes: every code of a format, over steps of keys that are full and that are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attn_cpu_testing import levels, needs_kernels

from attn_cpu.isa import forced
from attn_shared import Attention, CommonAttentionMetadata
from attn_shared.reference import AttentionOptions, paged_attention

FORMATS = ("fp8_e4m3", "fp8_e5m2", "int8_per_token_head")
SEQ_LENS = (1, 63, 64, 65, 130, 200)  # steps are of 64 keys


def layer_of(kv_cache_dtype: str, dtype: torch.dtype, width: int, block_size: int) -> Attention:
    return Attention(
        num_heads=6,
        num_kv_heads=2,
        head_size=width,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        block_size=block_size,
        backend="CPU_ATTN",
    )


def filled(layer: Attention, num_blocks: int, generator: torch.Generator) -> torch.Tensor:
    """A cache of every finite code, subnormal ones too."""
    cache = layer.allocate(num_blocks)
    views = layer.kv_cache_spec.split(cache)
    codes = torch.arange(256, dtype=torch.uint8)
    as_stored = codes.view(cache.dtype)
    # Codes of large values would leave one key alone to decide.
    usable = codes[as_stored.float().isfinite() & (as_stored.float().abs() <= 8)]
    if views.key_scale is not None:
        usable = codes
    for view in (views.key, views.value):
        drawn = usable[torch.randint(len(usable), view.shape, generator=generator)]
        view.copy_(drawn.view(cache.dtype))
    for scale in (views.key_scale, views.value_scale):
        if scale is not None:
            scale.copy_(torch.rand(scale.shape, generator=generator) / 64)
    return cache


@needs_kernels
@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("kv_cache_dtype", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("width", "block_size"), [(64, 16), (128, 128), (192, 32), (72, 24)])
def test_every_code_is_read(
    level: str, kv_cache_dtype: str, dtype: torch.dtype, width: int, block_size: int
) -> None:
    generator = torch.Generator().manual_seed(width)
    layer = layer_of(kv_cache_dtype, dtype, width, block_size)
    counts = [-(-length // block_size) for length in SEQ_LENS]
    table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
    ids = torch.randperm(sum(counts), generator=generator).int()
    for row, part in enumerate(ids.split(counts)):
        table[row, : len(part)] = part
    common = CommonAttentionMetadata.from_lengths(
        query_lens=[1] * len(SEQ_LENS), seq_lens=SEQ_LENS, block_table=table, block_size=block_size
    )
    cache = filled(layer, sum(counts), generator)
    query = torch.randn(len(SEQ_LENS), 6, width, generator=generator).to(dtype)
    with forced(level):
        output = layer.forward(query, None, None, cache, layer.plan(common))
    exact = reference(layer, query, cache, common)
    error = (output.double() - exact.output).abs().max()
    largest = exact.output.abs().max()
    assert error <= largest * (2e-6 if dtype is torch.float32 else 1e-2)


def reference(
    layer: Attention, query: torch.Tensor, cache: torch.Tensor, common: CommonAttentionMetadata
) -> Any:
    views = layer.kv_cache_spec.split(cache)
    return paged_attention(
        query,
        views.key,
        views.value,
        AttentionOptions(scale=layer.spec.scale),
        query_start_loc=common.query_start_loc,
        seq_lens=common.seq_lens,
        block_table=common.block_table,
        key_scales=views.key_scale,
        value_scales=views.value_scale,
    )
