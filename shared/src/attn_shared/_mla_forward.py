"""Prefill over latents: expand keys, attend to the step's own, merge in those of earlier steps."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from attn_shared.dtypes import KVQuantMode
from attn_shared.errors import InvalidInputError, UnsupportedOptionError
from attn_shared.kv_cache import MLAAttentionSpec
from attn_shared.mla_metadata import (
    ContextChunk,
    MLAPrefillMetadata,
    RaggedPart,
    require_mla_metadata,
)
from attn_shared.quantization import dequantize_fp8, quantize_fp8
from attn_shared.request import MLADims
from attn_shared.spec import LayerSpec
from attn_shared.tensor_checks import check_rows

if TYPE_CHECKING:
    from attn_shared.impl import MLAAttentionImpl, MLALayer
    from attn_shared.mla_prefill import MLAPrefill

__all__ = ["expanded", "gather_latents", "prefill_rows"]


def gather_latents(
    kv_cache: Tensor, slots: Tensor, dtype: torch.dtype, scale: float | Tensor | None = None
) -> Tensor:
    """Return the entries (n, latent_size) of some slots.

    Args:
        kv_cache: (num_blocks, block_size, latent_size), any strides of blocks and tokens.
        slots: (n,) int64.
        dtype: of the result.
        scale: of an fp8 cache: entry = stored * scale; None: the cache is of another kind.
    """
    stored = _gathered(kv_cache, slots)
    return stored.to(dtype) if scale is None else dequantize_fp8(stored, scale, dtype)


def _gathered(kv_cache: Tensor, slots: Tensor) -> Tensor:
    """Return entries as they are stored."""
    raw = kv_cache.view(torch.uint8) if kv_cache.dtype.itemsize == 1 else kv_cache
    num_blocks, size, width = raw.shape
    per_block, per_token, _ = raw.stride()
    if num_blocks and per_token and per_block % per_token == 0:
        # One index per entry, on the grid of tokens that padded blocks keep to as well.
        grid = per_block // per_token
        rows = raw.as_strided(((num_blocks - 1) * grid + size, width), (per_token, 1))
        block = slots.div(size, rounding_mode="floor")
        found = rows.index_select(0, torch.add(slots - block * size, block, alpha=grid))
    else:
        found = raw[slots // size, slots % size]
    return found.view(kv_cache.dtype)


def expanded(
    latent: Tensor, kv_b_proj: Tensor, spec: LayerSpec, starts: Tensor
) -> tuple[Tensor, Tensor]:
    """Return keys without rope part (n, H, nope) and values (n, H, Dv), views, of latents.

    A product's rounding may depend on its number of rows; in batch-invariant mode each request's
    entries are therefore expanded by themselves.

    Args:
        latent: (n, kv_lora_rank).
        kv_b_proj: (H * (qk_nope_head_dim + v_head_dim), kv_lora_rank).
        spec: of the layer.
        starts: (B + 1,) on the host, prefix sums of each request's entries.
    """
    nope = (spec.mla or MLADims()).qk_nope_head_dim
    if spec.batch_invariant:
        up = latent.new_empty(len(latent), len(kv_b_proj))
        for start, stop in pairwise(starts.tolist()):
            up[start:stop] = linear(latent[start:stop].clone(), kv_b_proj)
    else:
        up = linear(latent, kv_b_proj)
    up = up.view(len(latent), spec.num_heads, -1)
    return up[..., :nope], up[..., nope:]


def _attend(
    kernel: MLAPrefill,
    query: Tensor,
    entries: tuple[Tensor, Tensor],
    weight: Tensor,
    spec: LayerSpec,
    part: RaggedPart,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Expand entries, latent and rope part, and attend to them; `options` are the kernel's."""
    nope, value = expanded(entries[0], weight, spec, part.key_start_loc_cpu)
    return kernel.run_apart(query, nope, entries[1], value, part, **options)


def prefill_rows(
    impl: MLAAttentionImpl[Any],
    layer: MLALayer,
    query: Tensor,
    latent: Tensor,
    rope: Tensor,
    kv_cache: Tensor,
    metadata: object,
    output: Tensor,
    lse: Tensor | None,
) -> None:
    """Run `MLAAttentionImpl.forward_mha`; the arguments are its own."""
    part = require_mla_metadata(metadata).prefill
    if part is None:
        return
    num_rows = part.new.num_queries
    spec, cache = impl.spec, _cache_spec(impl.spec)
    weight = _checked(spec, layer, query, latent, rope, num_rows)
    own = latent[:num_rows], rope[:num_rows]
    entries = as_stored(*own, cache, layer.k_scale)
    result: Tensor
    sums: Tensor | None
    if part.context:
        result, sums = _with_context(impl, layer, query[:num_rows], entries, weight, kv_cache, part)
        output[:num_rows].copy_(result)
    else:
        result, sums = _attend(
            part.kernel,
            query[:num_rows],
            entries,
            weight,
            spec,
            part.new,
            output=output[:num_rows],
            # A kernel may compute otherwise for an LSE, which company with earlier keys asks for.
            returns_lse=lse is not None or spec.batch_invariant,
        )
        if result.data_ptr() != output.data_ptr():
            output[:num_rows].copy_(result)
    if lse is not None and sums is not None:
        lse[:, :num_rows].copy_(sums)
    for rows in part.blind:
        output[rows].zero_()
        if lse is not None:
            lse[:, rows].fill_(-torch.inf)


def as_stored(
    latent: Tensor, rope: Tensor, cache: MLAAttentionSpec, scale: float | Tensor
) -> tuple[Tensor, Tensor]:
    """Return the step's own entries as later steps will read them: an fp8 cache rounds them.

    So a row's answer does not depend on which step its keys came in.
    """
    if cache.quant_mode is not KVQuantMode.FP8_PER_TENSOR:
        return latent, rope
    return (
        dequantize_fp8(quantize_fp8(latent, scale, cache.dtype), scale, latent.dtype),
        dequantize_fp8(quantize_fp8(rope, scale, cache.dtype), scale, rope.dtype),
    )


def _with_context(
    impl: MLAAttentionImpl[Any],
    layer: MLALayer,
    query: Tensor,
    entries: tuple[Tensor, Tensor],
    weight: Tensor,
    kv_cache: Tensor,
    part: MLAPrefillMetadata,
) -> tuple[Tensor, Tensor]:
    """Attend to the step's own keys and then to each chunk; return float32 output and LSE."""
    attend = partial(_attend, part.kernel, weight=weight, spec=impl.spec, returns_lse=True)
    result, sums = attend(query, entries, part=part.new)
    total, total_lse = result.float(), _required(sums).contiguous()
    for chunk in part.context:
        rows = chunk.rows
        earlier = _earlier(impl, layer, kv_cache, chunk)
        found, sums = attend(query[rows], earlier, part=chunk.part)
        impl.merge_into(total[rows], total_lse[:, rows], found, _required(sums))
    return total, total_lse


def _earlier(
    impl: MLAAttentionImpl[Any], layer: MLALayer, kv_cache: Tensor, chunk: ContextChunk
) -> tuple[Tensor, Tensor]:
    """Return latent and rope part of a chunk's keys, in the compute dtype."""
    cache, dtype = _cache_spec(impl.spec), impl.spec.dtype
    cache.check(kv_cache)
    is_fp8 = cache.quant_mode is KVQuantMode.FP8_PER_TENSOR
    scale = layer.k_scale if is_fp8 else None
    entries = impl.gather_latents(kv_cache, chunk.slots, dtype, scale)
    if chunk.exchange is not None:
        entries = chunk.exchange(entries)
    return entries[:, : cache.kv_lora_rank], entries[:, cache.kv_lora_rank :]


def _cache_spec(spec: LayerSpec) -> MLAAttentionSpec:
    cache = spec.kv_cache_spec
    if not isinstance(cache, MLAAttentionSpec):
        raise UnsupportedOptionError("this layer has no cache of latents.")
    return cache


def _required(lse: Tensor | None) -> Tensor:
    if lse is None:
        raise UnsupportedOptionError(
            "the prefill returned no LSE, by which keys of earlier steps are merged.",
            hint="MLAPrefill.run returns it where returns_lse is set.",
        )
    return lse


def _checked(
    spec: LayerSpec,
    layer: MLALayer,
    query: Tensor,
    latent: Tensor,
    rope: Tensor,
    num_rows: int,
) -> Tensor:
    """Return kv_b_proj, after refusing tensors of other widths, dtypes or places."""
    dims = spec.mla or MLADims()
    weight = layer.kv_b_proj
    if weight is None:
        raise InvalidInputError.for_argument(
            "layer.kv_b_proj",
            None,
            f"({spec.num_heads} * {dims.qk_nope_head_dim + dims.v_head_dim}, {dims.kv_lora_rank}): "
            "prefill expands the latents by it",
        )
    width = dims.qk_nope_head_dim + dims.qk_rope_head_dim
    expected = (
        ("query", query, (spec.num_heads, width)),
        ("latent", latent, (dims.kv_lora_rank,)),
        ("rope", rope, (dims.qk_rope_head_dim,)),
    )
    for name, tensor, tail in expected:
        check_rows(name, tensor, num_rows, tail, spec.dtype, query.device)
    return weight
