"""Attention as torch computes it eagerly in a kernel's compute dtype: the yardstick of accuracy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from attn_shared._reference_batch import PagedBatch, paged, ragged
from attn_shared._reference_cache import PagedCache, latent_views
from attn_shared._reference_core import Arithmetic, AttentionOptions, ReferenceResult
from attn_shared.errors import InvalidInputError, UnsupportedOptionError
from attn_shared.quantization import FP8_DTYPES, dequantize_fp8, quantize_fp8

__all__ = ["eager_attention", "eager_mla_decode", "eager_varlen_attention"]

_NO_RANGES: Mapping[int, Sequence[tuple[int, int]]] = MappingProxyType({})


def eager_attention(
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
    compute_dtype: torch.dtype | None = None,
    q_scale: float | Tensor = 1.0,
    by_device: bool = False,
) -> ReferenceResult:
    """Compute the call of `attn_shared.reference.paged_attention` eagerly in reduced precision.

    Args:
        query: (T, Hq, D).
        key_cache: as in `paged_attention`, like every argument that is not listed here.
        value_cache: as in `paged_attention`.
        options: of the layer.
        query_start_loc: as in `paged_attention`.
        seq_lens: as in `paged_attention`.
        block_table: as in `paged_attention`.
        causal: as in `paged_attention`.
        mm_prefix_ranges: as in `paged_attention`.
        k_scale: as in `paged_attention`.
        v_scale: as in `paged_attention`.
        key_scales: as in `paged_attention`.
        value_scales: as in `paged_attention`.
        fresh_key: as in `paged_attention`.
        fresh_value: as in `paged_attention`.
        compute_dtype: of the kernel's products, by default the query's. An fp8 dtype stands for a
            kernel that multiplies in fp8: query and P are rounded to it.
        q_scale: of an fp8 query, per tensor or (Hq,).
        by_device: logits are the device's own products, see `Arithmetic`.

    Returns:
        Output (T, Hq, Dv) in compute_dtype (for fp8: in the query's dtype), and LSE (Hq, T) in
        float32 (float64 for a float64 query).

    Raises:
        InvalidInputError: as `paged_attention`, or q_scale is given without an fp8 compute dtype.
        UnsupportedOptionError: fresh tokens with an fp8 compute dtype, which reads what is stored.
    """
    compute = query.dtype if compute_dtype is None else compute_dtype
    if compute in FP8_DTYPES and fresh_key is not None:
        raise UnsupportedOptionError(
            f"compute_dtype={compute} was combined with fresh_key; fp8 products read what is "
            "stored.",
            hint="drop fresh_key, or name the dtype that the kernel multiplies in.",
        )
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
    arithmetic = replace(_eager(compute, query.dtype), by_device=by_device)
    with _ieee_float32():
        return paged(_as_operand(query, compute, q_scale), cache, options, batch, arithmetic)


def eager_varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: AttentionOptions,
    *,
    query_start_loc: Tensor,
    key_start_loc: Tensor | None = None,
    causal: bool,
) -> ReferenceResult:
    """Compute `attn_shared.reference.varlen_attention` eagerly in the query's dtype.

    `encoder_attention` is this with causal=False.

    Args:
        query: (T, Hq, D).
        key: (Tk, Hkv, D).
        value: (Tk, Hkv, Dv).
        options: of the layer.
        query_start_loc: integers (B + 1,).
        key_start_loc: integers (B + 1,); by default query_start_loc.
        causal: for all requests.

    Raises:
        InvalidInputError: as `varlen_attention`.
    """
    with _ieee_float32():
        return ragged(
            query,
            key,
            value,
            options,
            query_start_loc=query_start_loc,
            key_start_loc=query_start_loc if key_start_loc is None else key_start_loc,
            causal=causal,
            arithmetic=_eager(query.dtype, query.dtype),
        )


def eager_mla_decode(
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
    compute_dtype: torch.dtype | None = None,
) -> ReferenceResult:
    """Compute `attn_shared.reference.mla_decode` eagerly in reduced precision.

    Logits are the device's own products: over entries of 576 what tensor cores lose in a sum
    exceeds what rounding to float32 does.

    Args:
        query: (T, Hq, kv_lora_rank + qk_rope_head_dim).
        latent_cache: as in `mla_decode`, like every argument that is not listed here.
        scale: as in `mla_decode`.
        kv_lora_rank: as in `mla_decode`.
        query_start_loc: as in `mla_decode`.
        seq_lens: as in `mla_decode`.
        block_table: as in `mla_decode`.
        causal: as in `mla_decode`.
        cache_scale: as in `mla_decode`.
        compute_dtype: as in `eager_attention`.

    Raises:
        InvalidInputError: as `mla_decode`.
    """
    key_cache, value_cache = latent_views(latent_cache, kv_lora_rank)
    return eager_attention(
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
        compute_dtype=compute_dtype,
        by_device=True,
    )


def _eager(compute: torch.dtype, query_dtype: torch.dtype) -> Arithmetic:
    """Return the arithmetic of eager attention in `compute`."""
    accumulate = torch.promote_types(query_dtype, torch.float32)
    if compute in FP8_DTYPES:
        # Keys and values are stored * scale, exact products of fp8 numbers; only P is rounded anew.
        return Arithmetic(
            operand=accumulate, accumulate=accumulate, probability=compute, output=query_dtype
        )
    return Arithmetic(operand=compute, accumulate=accumulate, probability=compute, output=compute)


def _as_operand(query: Tensor, compute: torch.dtype, q_scale: float | Tensor) -> Tensor:
    """Return the query as a kernel that computes in `compute` sees it."""
    if compute in FP8_DTYPES:
        return dequantize_fp8(quantize_fp8(query, q_scale, compute), q_scale)
    if isinstance(q_scale, Tensor) or q_scale != 1.0:
        raise InvalidInputError.for_argument("q_scale", q_scale, "1.0 unless compute_dtype is fp8")
    return query


@contextmanager
def _ieee_float32() -> Iterator[None]:
    """Keep float32 products in IEEE arithmetic (no TF32, no bfloat16) meanwhile."""
    # torch >= 2.9 has a setting per library, and refuses to mix it with the older common one.
    libraries = _precision_holders()
    if not libraries:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)
        return
    saved = [library.fp32_precision for library in libraries]
    try:
        for library in libraries:
            library.fp32_precision = "ieee"
        yield
    finally:
        for library, precision in zip(libraries, saved, strict=True):
            library.fp32_precision = precision


def _precision_holders() -> list[Any]:
    holders = [getattr(torch.backends, name) for name in ("cuda", "mkldnn")]
    matmuls = [getattr(holder, "matmul", None) for holder in holders]
    return [matmul for matmul in matmuls if hasattr(matmul, "fp32_precision")]
