"""Reading a paged cache into dense keys and values of the compute dtype, with torch alone.

What a CPU copies fastest decides how blocks are gathered: `index_select` along rows that are
dense in memory is a memcpy per row and takes a third of the time of advanced indexing, so the
views are regarded as matrices of such rows wherever their strides allow it. The result is
token-major or head-major in memory, as the cache is; its logical shape is always (.., Hkv, D).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from attn_shared.dtypes import KVQuantMode
from attn_shared.errors import MetadataError
from attn_shared.kv_cache import KVViews
from attn_shared.quantization import dequantize_fp8, dequantize_int8_per_token_head
from attn_shared.workspace import Workspace
from attn_torch._plan import GroupTile, RequestTile

__all__ = ["CacheReader", "CallReader", "KeysValues", "gather_blocks", "gather_tokens"]

SCRATCH_BYTES = 16 * 2**20
"""From here on a gather goes to scratch memory: the allocator returns blocks of this size to the
system, and touching fresh pages costs several times the copy."""

_ALIGNMENT = 256


class KeysValues(NamedTuple):
    """Keys (R, L, Hkv, D) and values (R, L, Hkv, Dv) of R requests, any strides."""

    key: Tensor
    value: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CacheReader:
    """One layer's cache, as one step reads it.

    Attributes:
        views: of the cache tensor, by `AttentionSpec.split`.
        quant_mode: how entries are quantised.
        dtype: of the result.
        k_scale: key = stored * scale in an fp8 cache; per tensor or (Hkv,).
        v_scale: likewise for values.
        scratch: where large gathers go.
    """

    views: KVViews
    quant_mode: KVQuantMode
    dtype: torch.dtype
    k_scale: float | Tensor
    v_scale: float | Tensor
    scratch: Workspace

    def read(self, tile: RequestTile | GroupTile) -> KeysValues:
        """Return a tile's keys and values: positions [first_key, stop_key) of a lone request."""
        if isinstance(tile, GroupTile):
            return self._read_group(tile)
        if tile.blocks is None:
            raise MetadataError.for_argument(
                "metadata", "planned without a block table", "metadata of a builder with a cache"
            )
        size = self.views.key.shape[1]
        offset = tile.first_key // size * size
        wanted = slice(tile.first_key - offset, tile.stop_key - offset)
        places = self._places(tile.blocks.shape[0])
        stored = [
            None if view is None else gather_blocks(view, tile.blocks, out=place)[wanted]
            for view, place in zip(self.views, places, strict=True)
        ]
        key, value = self._decode(*stored)
        return KeysValues(key.unsqueeze(0), value.unsqueeze(0))

    def _read_group(self, tile: GroupTile) -> KeysValues:
        stored = [
            None if view is None else gather_tokens(view, tile.blocks, tile.offsets)
            for view in self.views
        ]
        return self._decode(*stored)

    def _places(self, num_blocks: int) -> tuple[Tensor | None, ...]:
        """Return bytes of scratch for each view's gathered blocks, None for new memory."""
        sizes = [
            num_blocks * prod(view.shape[1:]) * view.dtype.itemsize
            for view in (self.views.key, self.views.value)
        ]
        if sum(sizes) < SCRATCH_BYTES:
            return (None,) * len(self.views)
        start = _rounded_up(sizes[0])
        buffer = self.scratch.get(start + _rounded_up(sizes[1]))
        return (buffer[: sizes[0]], buffer[start : start + sizes[1]], None, None)

    def _decode(
        self,
        key: Tensor | None,
        value: Tensor | None,
        key_scale: Tensor | None = None,
        value_scale: Tensor | None = None,
    ) -> KeysValues:
        """Turn stored entries into numbers of the compute dtype."""
        if key is None or value is None:
            raise TypeError("a cache has keys and values")
        mode = self.quant_mode
        if mode is KVQuantMode.FP8_PER_TENSOR:
            return KeysValues(
                dequantize_fp8(key, self.k_scale, self.dtype),
                dequantize_fp8(value, self.v_scale, self.dtype),
            )
        if mode is KVQuantMode.INT8_PER_TOKEN_HEAD and key_scale is not None:
            if value_scale is None:
                raise TypeError("a cache with scales of keys has scales of values")
            return KeysValues(
                dequantize_int8_per_token_head(key, key_scale, self.dtype),
                dequantize_int8_per_token_head(value, value_scale, self.dtype),
            )
        return KeysValues(key.to(self.dtype), value.to(self.dtype))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CallReader:
    """Keys (Tk, Hkv, D) and values (Tk, Hkv, Dv) that come with the call."""

    key: Tensor
    value: Tensor

    def read(self, tile: RequestTile | GroupTile) -> KeysValues:
        """Return views of a tile's keys and values: (R, L, ..) of R equal requests."""
        if isinstance(tile, GroupTile) or tile.blocks is not None:
            raise MetadataError.for_argument(
                "metadata", "planned over a cache", "metadata of a builder without a cache"
            )
        span, count = tile.span, tile.count
        rows = slice(span.key_start, span.key_start + count * span.key_len)
        wanted = slice(tile.first_key, tile.stop_key)
        key, value = (
            side[rows].view(count, span.key_len, *side.shape[1:])[:, wanted]
            for side in (self.key, self.value)
        )
        return KeysValues(key, value)


def gather_blocks(view: Tensor, blocks: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return the slots of some blocks, one block after the other: (M * block_size, ...).

    Args:
        view: (num_blocks, block_size, ...), any strides.
        blocks: (M,) int32 or int64.
        out: bytes that the result is made in, exactly as many as it has; None: new memory.
    """
    raw = view.view(torch.uint8) if view.dtype.itemsize == 1 else view
    num_blocks, size, *tail = raw.shape
    count = blocks.shape[0]
    if _is_head_major(raw):
        heads, width = tail
        step, ratio = raw.stride(2), raw.stride(0) // raw.stride(2)
        rows = raw.as_strided(((num_blocks - 1) * ratio + heads, size * width), (step, 1))
        first = torch.arange(heads, device=raw.device).unsqueeze(1)
        index = torch.add(first, blocks, alpha=ratio).flatten()
        found = _select(rows, index, out).view(heads, count * size, width).transpose(0, 1)
    else:
        found = _select(raw, blocks, out).flatten(0, 1)
    return found.view(view.dtype)


def gather_tokens(view: Tensor, blocks: Tensor, offsets: Tensor) -> Tensor:
    """Return the slots view[blocks, offsets]: (R, L, ...).

    Args:
        view: (num_blocks, block_size, ...), any strides.
        blocks: (R, L) int64.
        offsets: (R, L) int64.
    """
    raw = view.view(torch.uint8) if view.dtype.itemsize == 1 else view
    if _is_head_major(raw):
        found = _select_entries(raw, blocks, offsets)
    elif _is_dense(raw, first_dim=2) and raw.stride(1) and raw.stride(0) % raw.stride(1) == 0:
        found = _select_tokens(raw, blocks, offsets)
    else:
        found = raw[blocks, offsets]
    return found.view(view.dtype)


def _select_tokens(view: Tensor, blocks: Tensor, offsets: Tensor) -> Tensor:
    """Select slots that are dense, each one row, out of blocks on the slots' grid."""
    num_blocks, size, *tail = view.shape
    ratio = view.stride(0) // view.stride(1)
    rows = view.as_strided(((num_blocks - 1) * ratio + size, *tail), view.stride()[1:])
    index = torch.add(offsets, blocks, alpha=ratio)
    return rows.index_select(0, index.flatten()).view(*index.shape, *tail)


def _select_entries(view: Tensor, blocks: Tensor, offsets: Tensor) -> Tensor:
    """Select slots of a head-major view, each head's entry one row: (R, L, Hkv, D), head-major."""
    num_blocks, size, heads, width = view.shape
    per_block = view.stride(0) // width
    rows = view.as_strided(((num_blocks - 1) * per_block + heads * size, width), (width, 1))
    token = torch.add(offsets, blocks, alpha=per_block).unsqueeze(1)
    head = torch.arange(0, heads * size, size, device=view.device).unsqueeze(1)
    index = token + head
    return rows.index_select(0, index.flatten()).view(*index.shape, width).transpose(1, 2)


def _select(rows: Tensor, index: Tensor, out: Tensor | None) -> Tensor:
    if out is None:
        return rows.index_select(0, index)
    shaped = out.view(rows.dtype).view(index.shape[0], *rows.shape[1:])
    return torch.index_select(rows, 0, index, out=shaped)


def _is_head_major(view: Tensor) -> bool:
    """Whether each head's slots of a block are one dense row, and rows lie on one grid."""
    if view.ndim != 4 or view.shape[2] == 1:
        return False
    _, size, _, width = view.shape
    per_block, per_token, per_head, per_element = view.stride()
    is_row = per_element == 1 and per_token == width and per_head == size * width
    return is_row and per_block % per_head == 0


def _is_dense(view: Tensor, *, first_dim: int) -> bool:
    """Whether the dimensions from `first_dim` on lie in memory without gaps, in their order."""
    expected = 1
    for dim in reversed(range(first_dim, view.ndim)):
        if view.shape[dim] != 1 and view.stride(dim) != expected:
            return False
        expected *= view.shape[dim]
    return True


def _rounded_up(num_bytes: int) -> int:
    """Round up to a quarter of the number's power of two, so that growth is rare."""
    step = max(_ALIGNMENT, 1 << max(0, num_bytes.bit_length() - 3))
    return -(-num_bytes // step) * step
