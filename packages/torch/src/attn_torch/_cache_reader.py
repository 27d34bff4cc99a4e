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
from attn_shared.kv_cache import AttentionSpec, KVViews
from attn_shared.quantization import dequantize_fp8, dequantize_int8_per_token_head
from attn_shared.workspace import Workspace
from attn_torch._plan import GroupTile, RequestTile

__all__ = ["CacheReader", "CallReader", "KeysValues", "gather_blocks", "gather_tokens"]

_SCRATCH_BYTES = 8 * 2**20
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
        spec: the cache's format.
        views: of the cache tensor, by `spec.split`.
        dtype: of the result.
        k_scale: key = stored * scale in an fp8 cache; per tensor or (Hkv,).
        v_scale: likewise for values.
        scratch: where large gathers go.
    """

    spec: AttentionSpec
    views: KVViews
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
        size = self.spec.block_size
        offset = tile.first_key // size * size
        wanted = slice(tile.first_key - offset, tile.stop_key - offset)
        stored = [
            None if view is None else self._gather(view, tile.blocks, place)[wanted]
            for place, view in enumerate(self.views)
        ]
        key, value = self._decode(*stored)
        return KeysValues(key.unsqueeze(0), value.unsqueeze(0))

    def _read_group(self, tile: GroupTile) -> KeysValues:
        stored = [
            None if view is None else gather_tokens(view, tile.blocks, tile.offsets)
            for view in self.views
        ]
        return self._decode(*stored)

    def _gather(self, view: Tensor, blocks: Tensor, place: int) -> Tensor:
        """Gather a view's blocks, keys (place 0) and values (place 1) side by side in scratch."""
        shape = (blocks.shape[0], *view.shape[1:])
        num_bytes = prod(shape) * view.dtype.itemsize
        if place > 1 or num_bytes < _SCRATCH_BYTES:
            return gather_blocks(view, blocks)
        share = _rounded_up(num_bytes)
        buffer = self.scratch.get(2 * share)[place * share : place * share + num_bytes]
        return gather_blocks(view, blocks, out=buffer)

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
        mode = self.spec.quant_mode
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
    num_blocks, size, *tail = raw.shape
    per_block, per_token = raw.stride()[:2]
    if _is_dense(raw, first_dim=2) and per_token and per_block % per_token == 0:
        ratio = per_block // per_token
        shape = ((num_blocks - 1) * ratio + size, *tail)
        rows = raw.as_strided(shape, raw.stride()[1:])
        index = torch.add(offsets, blocks, alpha=ratio)
        found = rows.index_select(0, index.flatten()).view(*index.shape, *tail)
    else:
        found = raw[blocks, offsets]
    return found.view(view.dtype)


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
