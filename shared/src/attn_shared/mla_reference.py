"""What a layer of multi-head latent attention answers: heads expanded, nothing absorbed.

Every entry of the cache is taken through the up-projection, as the model defines its keys and
values, and ordinary attention over them is the answer to decodes and prefills alike. The absorbed
form, `attn_shared.reference.mla_decode`, is the same computation in another order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from attn_shared._reference_core import AttentionOptions, ReferenceResult
from attn_shared.accuracy import eager_attention
from attn_shared.quantization import FP8_DTYPES, dequantize_fp8
from attn_shared.reference import paged_attention
from attn_shared.request import MLADims

__all__ = ["eager_mla_attention", "mla_attention"]


def mla_attention(
    query: Tensor,
    latent_cache: Tensor,
    kv_b_proj: Tensor,
    dims: MLADims,
    *,
    scale: float,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    causal: bool = True,
    cache_scale: float | Tensor = 1.0,
) -> ReferenceResult:
    """Attend in float64 to the keys and values that the cache's latents are expanded to.

    Args:
        query: (T, H, qk_nope_head_dim + qk_rope_head_dim).
        latent_cache: (num_blocks, block_size, latent_size), the step's own tokens written.
        kv_b_proj: (H * (qk_nope_head_dim + v_head_dim), kv_lora_rank).
        dims: widths.
        scale: of the logits.
        query_start_loc: integers (B + 1,).
        seq_lens: integers (B,).
        block_table: integers (B or more, M).
        causal: for all requests.
        cache_scale: of an fp8 cache, per tensor.

    Returns:
        Output (T, H, v_head_dim) and LSE (H, T), as `reference.paged_attention`.

    Raises:
        InvalidInputError: as `reference.paged_attention`.
    """
    entries, table = _in_use(latent_cache, block_table, seq_lens)
    return paged_attention(
        query,
        *_expanded(entries, kv_b_proj, dims, cache_scale, torch.float64),
        AttentionOptions(scale=scale),
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        block_table=table,
        causal=causal,
    )


def eager_mla_attention(
    query: Tensor,
    latent_cache: Tensor,
    kv_b_proj: Tensor,
    dims: MLADims,
    *,
    scale: float,
    seq_lens: Tensor,
    block_table: Tensor,
    cache_scale: float | Tensor = 1.0,
    **batch: Any,
) -> ReferenceResult:
    """Compute `mla_attention` eagerly in the query's dtype: the yardstick of accuracy.

    Args:
        query: as in `mla_attention`, like every argument.
        latent_cache: as in `mla_attention`.
        kv_b_proj: as in `mla_attention`.
        dims: as in `mla_attention`.
        scale: as in `mla_attention`.
        seq_lens: as in `mla_attention`.
        block_table: as in `mla_attention`.
        cache_scale: as in `mla_attention`.
        batch: query_start_loc and causal.
    """
    entries, table = _in_use(latent_cache, block_table, seq_lens)
    caches = _expanded(entries, kv_b_proj, dims, cache_scale, query.dtype)
    options = AttentionOptions(scale=scale)
    return eager_attention(query, *caches, options, seq_lens=seq_lens, block_table=table, **batch)


def _in_use(latent_cache: Tensor, block_table: Tensor, seq_lens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the blocks that some request reads, and a table of them: no others are expanded."""
    counts = -(-seq_lens.cpu() // latent_cache.shape[1])
    is_read = torch.arange(block_table.shape[1]) < counts.unsqueeze(1)
    table = block_table.cpu().long()[: len(counts)]
    used, places = table[is_read].unique(return_inverse=True)
    compact = torch.zeros_like(table, dtype=torch.int32)
    compact[is_read] = places.int()
    return latent_cache[used.to(latent_cache.device)], compact.to(block_table.device)


def _expanded(
    latent_cache: Tensor,
    kv_b_proj: Tensor,
    dims: MLADims,
    cache_scale: float | Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return caches of keys (blocks, size, H, nope + rope) and values (blocks, size, H, Dv)."""
    entries = latent_cache
    if entries.dtype in FP8_DTYPES:
        entries = dequantize_fp8(entries, cache_scale, dtype)
    latent, rope = entries.to(dtype).split([dims.kv_lora_rank, dims.qk_rope_head_dim], dim=-1)
    up = linear(latent, kv_b_proj.to(dtype))
    up = up.unflatten(-1, (-1, dims.qk_nope_head_dim + dims.v_head_dim))
    nope, value = up.split([dims.qk_nope_head_dim, dims.v_head_dim], dim=-1)
    shared = rope.unsqueeze(2).expand(-1, -1, nope.shape[2], -1)
    return torch.cat([nope, shared], dim=-1), value
