"""The specification: exact attention in float64, every feature, slow and obvious.

What these functions return is what every backend has to return, up to the error budget of
`attn_shared.accuracy`. They loop over requests and heads, select where a mask applies instead of
multiplying by it, and read nothing that the contract forbids a kernel to read.

Shapes: T query rows, B requests, Hq query heads, Hkv KV heads, D and Dv head sizes of K and V.
Query head h reads KV head h // (Hq / Hkv). Tensors stay on the device they are on, which must
know float64. The order of operations on a logit is scale, softcap, ALiBi, mask; sinks join after.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from attn_shared._reference_batch import PagedBatch, dense, paged, ragged
from attn_shared._reference_cache import PagedCache, latent_views
from attn_shared._reference_core import EXACT, AttentionOptions, ReferenceResult

__all__ = [
    "AttentionOptions",
    "ReferenceResult",
    "attention",
    "encoder_attention",
    "mla_absorb_query",
    "mla_decode",
    "mla_expand_latent",
    "mla_project_output",
    "paged_attention",
    "varlen_attention",
]

_NO_RANGES: Mapping[int, Sequence[tuple[int, int]]] = MappingProxyType({})


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: AttentionOptions,
    *,
    causal: bool = True,
    query_positions: Tensor | None = None,
    mm_prefix_ranges: Sequence[tuple[int, int]] = (),
) -> ReferenceResult:
    """Attend over one dense sequence.

    Args:
        query: (Tq, Hq, D).
        key: (Tk, Hkv, D), at absolute positions 0..Tk-1.
        value: (Tk, Hkv, Dv).
        options: of the layer.
        causal: whether a query sees keys up to its own position only.
        query_positions: int64 (Tq,); by default row r sits at Tk - Tq + r, which makes the mask
            bottom-right aligned. Rows before position 0 see nothing when causal.
        mm_prefix_ranges: (start, end) absolute positions, both inclusive, that see each other.

    Returns:
        Output (Tq, Hq, Dv) and LSE (Hq, Tq). A row without a visible key has output 0, and LSE
        -inf or the sink's logit.

    Raises:
        InvalidInputError: shapes, dtypes or options do not fit each other.
    """
    return dense(
        query,
        key,
        value,
        options,
        causal=causal,
        query_positions=query_positions,
        mm_prefix_ranges=mm_prefix_ranges,
        arithmetic=EXACT,
    )


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: AttentionOptions,
    *,
    query_start_loc: Tensor,
    key_start_loc: Tensor | None = None,
    causal: bool,
) -> ReferenceResult:
    """Attend over sequences laid one after another, without a cache.

    Args:
        query: (T, Hq, D).
        key: (Tk, Hkv, D).
        value: (Tk, Hkv, Dv).
        options: of the layer.
        query_start_loc: integers (B + 1,); request b owns query rows [b] to [b + 1].
        key_start_loc: the same for keys; by default query_start_loc.
        causal: for all requests, each aligned bottom-right.

    Returns:
        As `attention`; rows past query_start_loc[-1] are NaN.

    Raises:
        InvalidInputError: shapes, offsets or options do not fit each other.
    """
    return ragged(
        query,
        key,
        value,
        options,
        query_start_loc=query_start_loc,
        key_start_loc=query_start_loc if key_start_loc is None else key_start_loc,
        causal=causal,
        arithmetic=EXACT,
    )


def encoder_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: AttentionOptions,
    *,
    query_start_loc: Tensor,
    key_start_loc: Tensor | None = None,
) -> ReferenceResult:
    """Attend with full visibility per request: encoders, and cross attention without a cache.

    A window narrows to both sides: (W - 1, W - 1) for W keys that include the query's own. For the
    arguments and the result see `varlen_attention`. Cross attention over a paged cache is
    `paged_attention` with causal=False and the encoder's lengths and table.
    """
    return varlen_attention(
        query,
        key,
        value,
        options,
        query_start_loc=query_start_loc,
        key_start_loc=key_start_loc,
        causal=False,
    )


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    options: AttentionOptions,
    *,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    causal: bool | Tensor = True,
    mm_prefix_ranges: Mapping[int, Sequence[tuple[int, int]]] = _NO_RANGES,
    k_scale: float | Tensor = 1.0,
    v_scale: float | Tensor = 1.0,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    fresh_key: Tensor | None = None,
    fresh_value: Tensor | None = None,
) -> ReferenceResult:
    """Attend over a paged cache in which the step's new tokens are already written.

    Neither table entries past ceil(seq_len / block_size), nor slots past seq_len, nor blocks that
    the row does not name, nor query rows past query_start_loc[-1] are read.

    Args:
        query: (T, Hq, D).
        key_cache: (num_blocks, block_size, Hkv, D), any strides; floating, fp8 or int8.
        value_cache: (num_blocks, block_size, Hkv, Dv), any strides.
        options: of the layer.
        query_start_loc: integers (B + 1,); request b owns query rows [b] to [b + 1].
        seq_lens: integers (B,), keys of each request; 0 for padding.
        block_table: integers (B or more, M).
        causal: for all requests, or bool (B,), each by its own rule. Row r of a request sits at
            seq_len - query_len + r. Non-causal rows see every key, however many rows there are.
        mm_prefix_ranges: request index to (start, end) absolute positions, both inclusive, that
            see each other in both directions, whatever causality and window say.
        k_scale: stored * scale is the key, for fp8 caches; per tensor or (Hkv,).
        v_scale: the same for values.
        key_scales: float32 (num_blocks, block_size, Hkv), needed by int8 caches: one scale per
            token and head.
        value_scales: the same for values.
        fresh_key: (T, Hkv, D). When given, the step's new tokens are read from here instead of as
            they were stored: the mode that a backend declares with `reads_fresh_kv`.
        fresh_value: (T, Hkv, Dv), given with fresh_key.

    Returns:
        Output (T, Hq, Dv) and LSE (Hq, T). A row without a visible key, padding included, has
        output 0, and LSE -inf or the sink's logit. Rows past query_start_loc[-1] are NaN.

    Raises:
        InvalidInputError: shapes, lengths, block ids, scales or options do not fit each other.
        UnsupportedOptionError: the cache's dtype does not say what its bytes mean.
    """
    cache = PagedCache(
        key_cache=key_cache,
        value_cache=value_cache,
        block_table=block_table,
        k_scale=k_scale,
        v_scale=v_scale,
        key_scales=key_scales,
        value_scales=value_scales,
    )
    batch = PagedBatch(
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        causal=causal,
        mm_prefix_ranges=mm_prefix_ranges,
        fresh_key=fresh_key,
        fresh_value=fresh_value,
    )
    return paged(query, cache, options, batch, EXACT)


def mla_decode(
    query: Tensor,
    latent_cache: Tensor,
    *,
    scale: float,
    kv_lora_rank: int,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    causal: bool | Tensor = True,
    cache_scale: float | Tensor = 1.0,
) -> ReferenceResult:
    """Attend in latent space (absorbed MLA): one KV head whose value is the latent part of its key.

    Args:
        query: (T, Hq, kv_lora_rank + qk_rope_head_dim), already absorbed (`mla_absorb_query`).
        latent_cache: (num_blocks, block_size, kv_lora_rank + qk_rope_head_dim), any strides.
        scale: of the logits before absorption, the caller's; no head size here implies it.
        kv_lora_rank: width of the latent part, which comes first.
        query_start_loc: integers (B + 1,).
        seq_lens: integers (B,).
        block_table: integers (B or more, M).
        causal: for all requests, or bool (B,).
        cache_scale: per tensor, of an fp8 cache.

    Returns:
        Output (T, Hq, kv_lora_rank) and LSE (Hq, T), as `paged_attention`.

    Raises:
        InvalidInputError: as `paged_attention`, or kv_lora_rank is not inside the entry.
    """
    key_cache, value_cache = latent_views(latent_cache, kv_lora_rank)
    return paged_attention(
        query,
        key_cache,
        value_cache,
        AttentionOptions(scale=scale),
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        block_table=block_table,
        causal=causal,
        k_scale=cache_scale,
        v_scale=cache_scale,
    )


def mla_expand_latent(latent: Tensor, key_up: Tensor, value_up: Tensor) -> tuple[Tensor, Tensor]:
    """Return float64 key (Tk, H, nope + rope) and value (Tk, H, Dv): MLA without absorption.

    Args:
        latent: (Tk, kv_lora_rank + rope), entries of the cache.
        key_up: (kv_lora_rank, H, nope), the up-projection of keys.
        value_up: (kv_lora_rank, H, Dv), the up-projection of values.
    """
    rank, heads = key_up.shape[:2]
    compressed, rope = latent[:, :rank].double(), latent[:, rank:].double()
    key_nope = torch.einsum("tr,rhn->thn", compressed, key_up.double())
    key_rope = rope.unsqueeze(1).expand(-1, heads, -1)
    value = torch.einsum("tr,rhv->thv", compressed, value_up.double())
    return torch.cat([key_nope, key_rope], dim=-1), value


def mla_absorb_query(query: Tensor, key_up: Tensor) -> Tensor:
    """Return float64 query (T, H, kv_lora_rank + rope): the key up-projection moved to the query.

    Args:
        query: (T, H, nope + rope).
        key_up: (kv_lora_rank, H, nope).
    """
    nope = key_up.shape[-1]
    absorbed = torch.einsum("thn,rhn->thr", query[..., :nope].double(), key_up.double())
    return torch.cat([absorbed, query[..., nope:].double()], dim=-1)


def mla_project_output(output: Tensor, value_up: Tensor) -> Tensor:
    """Return float64 output (T, H, Dv) of a latent output.

    Args:
        output: (T, H, kv_lora_rank).
        value_up: (kv_lora_rank, H, Dv).
    """
    return torch.einsum("thr,rhv->thv", output.double(), value_up.double())
