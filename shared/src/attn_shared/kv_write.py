"""Slot mappings, and writing and gathering paged caches with torch alone."""

from __future__ import annotations

from typing import NamedTuple

import torch

from attn_shared._integer_checks import check_batch_tensors, check_count
from attn_shared.argument_checks import require_floats, require_kind, require_tensor
from attn_shared.dtypes import KVQuantMode, dtype_name
from attn_shared.errors import InvalidInputError, UnsupportedOptionError
from attn_shared.kv_cache import AttentionSpec, KVViews, MLAAttentionSpec
from attn_shared.nvfp4 import quantize_nvfp4
from attn_shared.quantization import quantize_fp8, quantize_int8_per_token_head

__all__ = [
    "PAD_SLOT_ID",
    "check_latent_write",
    "check_write",
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

    Raises:
        MetadataError: a tensor is none of integers of that shape, or they lie on several devices,
            or the block size is no count.
    """
    check_batch_tensors(block_table, query_start_loc, seq_lens)
    check_count("block_size", block_size)
    request, position = token_positions(query_start_loc, seq_lens)
    block = block_table[request, position.clamp_min(0) // block_size].long()
    slot = block * block_size + position % block_size
    return torch.where(position < 0, PAD_SLOT_ID, slot)


class _Places(NamedTuple):
    """Where the rows of a step go.

    `rows` picks them, `block` and `offset` place them; where `is_written` is False the cache keeps
    what it holds, and None means that all are written.
    """

    rows: torch.Tensor | slice
    block: torch.Tensor
    offset: torch.Tensor
    is_written: torch.Tensor | None = None


def _places(slot_mapping: torch.Tensor, block_size: int, num_blocks: int) -> _Places:
    """Leave out the padded rows, by shape on the host and by value on a device.

    Raises:
        InvalidInputError: a slot is past the cache, or below -1; looked at on the host alone, where
            that is not to wait for a device.
    """
    if _is_on_host(slot_mapping):
        least, most = map(int, slot_mapping.aminmax())
        if least < PAD_SLOT_ID:
            raise InvalidInputError.for_argument(
                f"slot_mapping[{int(slot_mapping.argmin())}]", least, "a slot, or -1 for none"
            )
        if most >= num_blocks * block_size:
            raise InvalidInputError.for_argument(
                f"slot_mapping[{int(slot_mapping.argmax())}]",
                most,
                f"below {num_blocks * block_size}: the cache has {num_blocks} blocks of "
                f"{block_size}",
            )
        rows: slice | torch.Tensor = slice(len(slot_mapping))
        if least < 0:
            rows = (slot_mapping >= 0).nonzero().squeeze(1)
        slots = slot_mapping[rows]
        return _Places(rows, slots // block_size, slots % block_size)
    # Padded rows repeat a row that is written anyway: to write one value twice is deterministic,
    # and needs neither a synchronisation nor a shape that depends on values. Without any such row
    # block 0 is written with what it holds.
    is_real = slot_mapping >= 0
    rows = torch.arange(len(slot_mapping), device=slot_mapping.device)
    rows = torch.where(is_real, rows, is_real.int().argmax())
    slots = slot_mapping[rows]
    real_slots = slots.clamp_min(0)
    return _Places(rows, real_slots // block_size, real_slots % block_size, slots >= 0)


def _is_on_host(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


def _put(target: torch.Tensor, places: _Places, values: torch.Tensor) -> None:
    """Write values (T, ...) to target (num_blocks, block_size, ...)."""
    if target.dtype.itemsize == 1:  # index_put_ knows no float8: move the bytes
        target, values = target.view(torch.uint8), values.view(torch.uint8)
    place = (places.block, places.offset)
    if places.is_written is not None:
        is_written = places.is_written.view(-1, *[1] * (values.ndim - 1))
        values = torch.where(is_written, values, target[place])
    target[place] = values


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
        k_scale: stored = key / k_scale for an fp8 cache; a number, or (Hkv,) float32. 1 for every
            other cache.
        v_scale: likewise for values.

    Raises:
        InvalidInputError: a shape, dtype, device or scale does not fit, or, on the host, a slot is
            past the cache.
        UnsupportedOptionError: a format that is not written with torch.
    """
    views = _checked_views(kv_cache, spec, key, value, slot_mapping)
    if len(slot_mapping) == 0:
        return
    places = _places(slot_mapping, spec.block_size, kv_cache.shape[0])
    key_stored, key_row_scale = _encode(spec, "k_scale", key[places.rows], k_scale)
    value_stored, value_row_scale = _encode(spec, "v_scale", value[places.rows], v_scale)
    _put(views.key, places, key_stored)
    _put(views.value, places, value_stored)
    if views.key_scale is not None and key_row_scale is not None:
        _put(views.key_scale, places, key_row_scale)
    if views.value_scale is not None and value_row_scale is not None:
        _put(views.value_scale, places, value_row_scale)


def check_write(
    kv_cache: torch.Tensor,
    spec: AttentionSpec,
    key: torch.Tensor,
    value: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    k_scale: float | torch.Tensor = 1.0,
    v_scale: float | torch.Tensor = 1.0,
) -> KVViews:
    """Refuse what `write_kv` refuses, with the same words, for kernels that write in its place.

    Takes the arguments of `write_kv`, launches nothing, and returns the views of the cache.

    Raises:
        InvalidInputError: a shape, dtype, device or scale does not fit.
        UnsupportedOptionError: a format that has no one way of being written.
    """
    views = _checked_views(kv_cache, spec, key, value, slot_mapping)
    _encode(spec, "k_scale", key[:0], k_scale)
    _encode(spec, "v_scale", value[:0], v_scale)
    return views


def _checked_views(
    kv_cache: torch.Tensor,
    spec: AttentionSpec,
    key: torch.Tensor,
    value: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> KVViews:
    require_kind("spec", spec, AttentionSpec)
    views = spec.split(kv_cache)
    _check_slots(slot_mapping, kv_cache)
    num_tokens = len(slot_mapping)
    _check_rows("key", key, num_tokens, (spec.num_kv_heads, spec.head_size), kv_cache)
    _check_rows("value", value, num_tokens, (spec.num_kv_heads, spec.head_size_v), kv_cache)
    return views


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
        slot_mapping: (T,) int64; -1 is not written. Rows past its length are ignored.
        scale: stored = entry / scale for an fp8 cache, 1 for every other.

    Raises:
        InvalidInputError: a shape, dtype, device or scale does not fit, or, on the host, a slot is
            past the cache.
        UnsupportedOptionError: a format that is not written with torch.
    """
    views = _checked_latents(kv_cache, spec, latent, rope, slot_mapping)
    if len(slot_mapping) == 0:
        return
    places = _places(slot_mapping, spec.block_size, kv_cache.shape[0])
    entry = torch.cat((latent[places.rows], rope[places.rows]), dim=-1).unsqueeze(1)
    _put(views.key, places, _encode(spec, "scale", entry, scale)[0])


def check_latent_write(
    kv_cache: torch.Tensor,
    spec: MLAAttentionSpec,
    latent: torch.Tensor,
    rope: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    scale: float | torch.Tensor = 1.0,
) -> KVViews:
    """Refuse what `concat_and_cache_mla` refuses, for kernels that write in its place.

    Takes its arguments, launches nothing, and returns the views of the cache.

    Raises:
        InvalidInputError: a shape, dtype, device or scale does not fit.
        UnsupportedOptionError: a format that is not written.
    """
    views = _checked_latents(kv_cache, spec, latent, rope, slot_mapping)
    _encode(spec, "scale", latent[:0].unsqueeze(1), scale)
    return views


def _checked_latents(
    kv_cache: torch.Tensor,
    spec: MLAAttentionSpec,
    latent: torch.Tensor,
    rope: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> KVViews:
    require_kind("spec", spec, MLAAttentionSpec)
    views = spec.split(kv_cache)
    _check_slots(slot_mapping, kv_cache)
    num_tokens = len(slot_mapping)
    _check_rows("latent", latent, num_tokens, (spec.kv_lora_rank,), kv_cache)
    _check_rows("rope", rope, num_tokens, (spec.head_size - spec.kv_lora_rank,), kv_cache)
    return views


def _encode(
    spec: AttentionSpec | MLAAttentionSpec,
    name: str,
    values: torch.Tensor,
    scale: float | torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return what is stored for values (T, H, D), and the scale that is stored beside each row."""
    if spec.quant_mode is KVQuantMode.FP8_PER_TENSOR:
        return quantize_fp8(values, scale, spec.dtype), None
    if spec.quant_mode is KVQuantMode.NVFP4:
        return quantize_nvfp4(values, scale)
    _check_is_one(name, scale, spec.kv_cache_dtype)
    if spec.quant_mode is KVQuantMode.NONE:
        return values.to(spec.dtype), None
    if spec.quant_mode is KVQuantMode.INT8_PER_TOKEN_HEAD and isinstance(spec, AttentionSpec):
        return quantize_int8_per_token_head(values)
    raise UnsupportedOptionError(
        f"kv_cache_dtype={spec.kv_cache_dtype!r} of {type(spec).__name__} is not written with "
        "torch.",
        hint="choose a backend that brings its own cache-write kernel.",
    )


def gather_rows(
    view: torch.Tensor, block_table_row: torch.Tensor, length: int, *, start: int = 0
) -> torch.Tensor:
    """Return positions [start, length) of one request, gathered from its blocks.

    Args:
        view: (num_blocks, block_size, ...), a view of `KVCacheSpec.split`.
        block_table_row: (M,) block ids; entries past ceil(length / block_size) are not read.
        length: end position.
        start: first position.

    Nothing is looked at here: what calls it for each request has checked its batch.
    """
    block_size = view.shape[1]
    first, last = start // block_size, -(-length // block_size)
    blocks = view[block_table_row[first:last].long()]
    offset = first * block_size
    return blocks.flatten(0, 1)[start - offset : length - offset]


def _check_slots(slot_mapping: torch.Tensor, kv_cache: torch.Tensor) -> None:
    require_tensor("slot_mapping", slot_mapping)
    if slot_mapping.dtype is not torch.int64 or slot_mapping.ndim != 1:
        raise InvalidInputError.for_argument(
            "slot_mapping",
            f"{dtype_name(slot_mapping.dtype)} {tuple(slot_mapping.shape)}",
            "int64 (T,)",
            hint="a slot of a large cache does not fit 32 bits.",
        )
    _check_device("slot_mapping", slot_mapping, kv_cache)


def _check_rows(
    name: str,
    rows: torch.Tensor,
    num_tokens: int,
    tail: tuple[int, ...],
    kv_cache: torch.Tensor,
) -> None:
    require_floats(name, rows)
    if rows.shape[1:] != tail or rows.shape[0] < num_tokens:
        raise InvalidInputError.for_argument(
            f"{name} shape",
            tuple(rows.shape),
            f"({', '.join(map(str, (f'at least {num_tokens}', *tail)))})",
        )
    _check_device(name, rows, kv_cache)


def _check_device(name: str, tensor: torch.Tensor, kv_cache: torch.Tensor) -> None:
    if tensor.device != kv_cache.device:
        raise InvalidInputError.for_argument(
            f"device of {name}", tensor.device, f"{kv_cache.device}, the device of kv_cache"
        )


def _check_is_one(name: str, scale: float | torch.Tensor, kv_cache_dtype: str) -> None:
    """Refuse a scale that would be dropped. On another device its contents are not looked at."""
    if isinstance(scale, torch.Tensor):
        is_one = scale.device.type != "cpu" or bool((scale == 1).all())
    else:
        is_one = scale == 1
    if not is_one:
        raise InvalidInputError.for_argument(
            name, scale, f"1 with kv_cache_dtype={kv_cache_dtype!r}, which has no such scale"
        )
