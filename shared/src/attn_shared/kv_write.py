"""Slot mappings, and writing and gathering paged caches with torch alone."""

from __future__ import annotations

import torch

from attn_shared.dtypes import KVQuantMode, kv_quant_mode
from attn_shared.errors import InvalidInputError, UnsupportedOptionError
from attn_shared.kv_cache import AttentionSpec, KVViews, MLAAttentionSpec
from attn_shared.quantization import quantize_fp8, quantize_int8_per_token_head

__all__ = [
    "PAD_SLOT_ID",
    "concat_and_cache_mla",
    "gather_rows",
    "slot_mapping_for",
    "token_positions",
    "write_kv",
]

PAD_SLOT_ID = -1
"""A slot of this value is not written."""


def token_positions(
    query_start_loc: torch.Tensor, seq_lens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the request and the absolute position of each query token: int64 (T,) each.

    Token r of a request sits at position seq_len - query_len + r; in a padded row (seq_len 0)
    positions are negative.

    Args:
        query_start_loc: (B + 1,) integers.
        seq_lens: (B,) integers, this step's tokens included.
    """
    query_lens = query_start_loc.diff().long()
    rows = torch.arange(len(seq_lens), device=seq_lens.device)
    request = torch.repeat_interleave(rows, query_lens)
    first = seq_lens.long() - query_lens - query_start_loc[:-1].long()
    return request, torch.arange(len(request), device=seq_lens.device) + first[request]


def slot_mapping_for(
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_size: int,
) -> torch.Tensor:
    """Return the slot of each query token: (T,) int64.

    Token r of a request sits at position seq_len - query_len + r; its slot is
    block_table[request, position // block_size] * block_size + position % block_size. A padded row
    (seq_len 0) has no positions: its slots are -1.

    Args:
        block_table: (B, M) int32.
        query_start_loc: (B + 1,) int32.
        seq_lens: (B,) int32, this step's tokens included.
        block_size: tokens per block.
    """
    request, position = token_positions(query_start_loc, seq_lens)
    block = block_table[request, position.clamp_min(0) // block_size].long()
    slot = block * block_size + position % block_size
    return torch.where(position < 0, PAD_SLOT_ID, slot)


def _without_pads(slot_mapping: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (row, slot): for a padded entry, those of a row that is written anyway.

    Writing one row twice with the same value is deterministic, and it needs neither a
    synchronisation nor a shape that depends on values, as masking would. With no row to write,
    `slot` is -1 throughout.
    """
    is_real = slot_mapping >= 0
    stand_in = is_real.int().argmax()
    rows = torch.arange(len(slot_mapping), device=slot_mapping.device)
    row = torch.where(is_real, rows, stand_in)
    return row, slot_mapping[row]


def _put(target: torch.Tensor, slots: torch.Tensor, values: torch.Tensor) -> None:
    """Write values (T, ...) to target (num_blocks, block_size, ...); slots of -1 keep their old."""
    block_size = target.shape[1]
    block, offset = slots.clamp_min(0) // block_size, slots.clamp_min(0) % block_size
    if target.dtype.itemsize == 1:  # index_put_ knows no float8: move the bytes
        target, values = target.view(torch.uint8), values.view(torch.uint8)
    is_real = (slots >= 0).view(-1, *[1] * (values.ndim - 1))
    target[block, offset] = torch.where(is_real, values, target[block, offset])


def write_kv(
    kv_cache: torch.Tensor,
    spec: AttentionSpec,
    key: torch.Tensor,
    value: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    k_scale: float | torch.Tensor = 1.0,
    v_scale: float | torch.Tensor = 1.0,
) -> None:
    """Write the step's keys and values into their slots.

    Args:
        kv_cache: a cache of `spec`.
        spec: the cache's format.
        key: (T, Hkv, D).
        value: (T, Hkv, Dv).
        slot_mapping: (T,) int64; -1 is not written. Rows of key and value past its length are
            ignored.
        k_scale: stored = key / k_scale for an fp8 cache; a number, or (Hkv,) float32.
        v_scale: likewise for values.

    Raises:
        InvalidInputError: shapes do not fit.
        UnsupportedOptionError: a format that is not written with torch.
    """
    views = spec.split(kv_cache)
    num_tokens = len(slot_mapping)
    _check_rows("key", key, num_tokens, (spec.num_kv_heads, spec.head_size))
    _check_rows("value", value, num_tokens, (spec.num_kv_heads, spec.head_size_v))
    if num_tokens == 0:
        return
    row, slots = _without_pads(slot_mapping)
    stored = _encode(spec, key[row], value[row], k_scale, v_scale)
    for target, values in zip(views, stored, strict=True):
        if target is not None and values is not None:
            _put(target, slots, values)


def _encode(
    spec: AttentionSpec,
    key: torch.Tensor,
    value: torch.Tensor,
    k_scale: float | torch.Tensor,
    v_scale: float | torch.Tensor,
) -> KVViews:
    """Return what is stored for key and value, with scales where they are stored beside."""
    if spec.quant_mode is KVQuantMode.NONE:
        return KVViews(key.to(spec.dtype), value.to(spec.dtype))
    if spec.quant_mode is KVQuantMode.FP8_PER_TENSOR:
        return KVViews(
            quantize_fp8(key, k_scale, spec.dtype), quantize_fp8(value, v_scale, spec.dtype)
        )
    if spec.quant_mode is KVQuantMode.INT8_PER_TOKEN_HEAD:
        (k, k_row), (v, v_row) = map(quantize_int8_per_token_head, (key, value))
        return KVViews(k, v, k_row, v_row)
    raise _not_written(spec.kv_cache_dtype)


def _not_written(kv_cache_dtype: str) -> UnsupportedOptionError:
    return UnsupportedOptionError(
        f"kv_cache_dtype={kv_cache_dtype!r} is not written with torch.",
        hint="choose a backend that brings its own cache-write kernel.",
    )


def concat_and_cache_mla(
    kv_cache: torch.Tensor,
    spec: MLAAttentionSpec,
    latent: torch.Tensor,
    rope: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    scale: float | torch.Tensor = 1.0,
) -> None:
    """Write latents and rope parts as cache entries.

    Args:
        kv_cache: a cache of `spec`.
        spec: the cache's format.
        latent: (T, kv_lora_rank).
        rope: (T, qk_rope_head_dim).
        slot_mapping: (T,) int64; -1 is not written.
        scale: stored = entry / scale, saturating, for an fp8 cache; one for the whole entry.

    Raises:
        UnsupportedOptionError: a format that is not written with torch.
    """
    views = spec.split(kv_cache)
    if len(slot_mapping) == 0:
        return
    row, slots = _without_pads(slot_mapping)
    entry = torch.cat((latent, rope), dim=-1)[row].unsqueeze(1)
    mode = kv_quant_mode(spec.kv_cache_dtype)
    if mode is KVQuantMode.FP8_PER_TENSOR:
        entry = quantize_fp8(entry, scale, spec.dtype)
    elif mode is not KVQuantMode.NONE:
        raise _not_written(spec.kv_cache_dtype)
    _put(views.key, slots, entry.to(spec.dtype))


def gather_rows(
    view: torch.Tensor, block_table_row: torch.Tensor, length: int, *, start: int = 0
) -> torch.Tensor:
    """Return positions [start, length) of one request, gathered from its blocks.

    Args:
        view: (num_blocks, block_size, ...), a view of `KVCacheSpec.split`.
        block_table_row: (M,) block ids; entries past ceil(length / block_size) are not read.
        length: end position.
        start: first position.
    """
    block_size = view.shape[1]
    first, last = start // block_size, -(-length // block_size)
    blocks = view[block_table_row[first:last].long()]
    offset = first * block_size
    return blocks.flatten(0, 1)[start - offset : length - offset]


def _check_rows(name: str, rows: torch.Tensor, num_tokens: int, tail: tuple[int, ...]) -> None:
    if rows.ndim != 3 or tuple(rows.shape[1:]) != tail or rows.shape[0] < num_tokens:
        raise InvalidInputError.for_argument(
            f"{name} shape", tuple(rows.shape), f"(at least {num_tokens}, {tail[0]}, {tail[1]})"
        )
