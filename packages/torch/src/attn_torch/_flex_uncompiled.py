"""Batches for the uncompiled operator: tiles side by side, each with its own dense keys.

The operator holds all scores of a call in memory, so that calls are kept small; each costs about
10 ms of Python, whatever its size, so that they are kept few. Keys are gathered token by token: no
slot is read that does not belong to the tile's request, and a cache of any strides and block size
will do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_torch._flex_call import FlexResult, call_uncompiled
from attn_torch._flex_masks import Logits, see
from attn_torch._flex_table import PagedTable
from attn_torch._flex_tiles import Tile, TileRows, cut, facts_of
from attn_torch._precision import accumulator_dtype
from attn_torch._spans import Span
from attn_torch._visibility import Visibility

__all__ = ["DensePlan", "KeySlots", "plan_dense"]

_SCORE_BYTES = 32 * 2**20
"""Most bytes of one float32 score tensor; the operator makes about six of them."""

_MAX_ROWS = 256  # of a tile: a longer one computes more scores right of the causal bound
_MAX_WASTE = 2.0  # scores of a call over those of its tiles alone


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeySlots:
    """Where keys are: (blocks, offsets) in a cache, or rows of the call's own keys.

    Attributes:
        rows: int64 of any shape: block ids, or rows of key and value.
        offsets: the same shape: slots inside the blocks; None without a cache.
    """

    rows: Tensor
    offsets: Tensor | None

    @classmethod
    def of(
        cls, request: Tensor, key: Tensor, table: PagedTable | None, device: torch.device
    ) -> KeySlots:
        """Find keys.

        Args:
            request: int64, broadcast with `key`: rows of the table, or first rows of the requests'
                own keys where there is no table.
            key: int64 absolute positions.
            table: of the cache, or None.
            device: where the result is needed.
        """
        if table is None:
            return cls(rows=(request + key).to(device), offsets=None)
        blocks = table.blocks[request, key // table.block_size]
        return cls(rows=blocks.to(device), offsets=(key % table.block_size).to(device))

    def read(self, source: Tensor, dtype: torch.dtype) -> Tensor:
        """Return (..., Hkv, D) of a cache view (num_blocks, block_size, Hkv, D) or (Tk, Hkv, D)."""
        found = source[self.rows] if self.offsets is None else source[self.rows, self.offsets]
        return found.to(dtype)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DensePlan:
    """One call: n tiles of R rows, each over K keys of its own.

    Attributes:
        rows: where the tiles' rows come from.
        slots: (n, K): where their keys are; places past a tile's keys repeat its last one.
        first_key: (n,) int32: absolute position of each tile's first key.
        first_position: (n,) int32: absolute position of each tile's first row.
        mask: (n, R, K) bool.
    """

    rows: TileRows
    slots: KeySlots
    first_key: Tensor
    first_position: Tensor
    mask: Tensor

    def run(self, query: Tensor, key: Tensor, value: Tensor, logits: Logits) -> FlexResult:
        """Attend.

        Args:
            query: (T, Hq, D).
            key: (num_blocks, block_size, Hkv, D), or (Tk, Hkv, D) without a cache.
            value: likewise, of width Dv.
            logits: of the layer.

        Returns:
            Output (n, Hkv, R * G, Dv) and LSE (n, Hkv, R * G).
        """
        num_kv_heads = key.shape[-2]
        group = query.shape[1] // num_kv_heads
        mask, first_key = self.mask, self.first_key

        def is_visible(tile: Tensor, head: Tensor, row: Tensor, place: Tensor) -> Tensor:
            return mask[tile, row // group, place]

        def key_position(tile: Tensor, place: Tensor) -> Tensor:
            return first_key[tile] + place

        dtype = query.dtype
        if dtype is torch.float32:
            dtype = accumulator_dtype(query.device)
        return call_uncompiled(
            self.rows.take(query, num_kv_heads).to(dtype),
            self.slots.read(key, dtype).transpose(1, 2),
            self.slots.read(value, dtype).transpose(1, 2),
            mask_mod=is_visible,
            score_mod=logits.score_mod(self.first_position, group, key_position),
            scale=logits.scale,
        )


def plan_dense(
    spans: Sequence[Span],
    table: PagedTable | None,
    visibility: Visibility,
    num_heads: int,
    device: torch.device,
) -> tuple[DensePlan, ...]:
    """Return calls that cover all rows of the spans.

    Args:
        spans: rows of requests that see at least one key.
        table: of the cache; None where the keys come with the call.
        visibility: window and chunk of the layers.
        num_heads: query heads.
        device: where the kernels run.
    """
    max_scores = _SCORE_BYTES // (4 * num_heads)
    tiles = [
        tile
        for span in spans
        for tile in cut(span, visibility, max(1, min(_MAX_ROWS, max_scores // span.key_len)))
    ]
    return tuple(_plan(group, table, visibility, device) for group in _groups(tiles, max_scores))


def _num_keys(tile: Tile) -> int:
    return tile.stop_key - tile.first_key


def _groups(tiles: Sequence[Tile], max_scores: int) -> Iterator[list[Tile]]:
    """Put neighbours into one call while padding them to one shape wastes little."""
    members: list[Tile] = []
    num_rows = num_keys = needed = 0
    for tile in tiles:
        rows, keys = max(num_rows, tile.num_rows), max(num_keys, _num_keys(tile))
        scores = (len(members) + 1) * rows * keys
        own = tile.num_rows * _num_keys(tile)
        if members and (scores > max_scores or scores > _MAX_WASTE * (needed + own)):
            yield members
            members, needed = [], 0
            rows, keys = tile.num_rows, _num_keys(tile)
        members.append(tile)
        num_rows, num_keys, needed = rows, keys, needed + own
    if members:
        yield members


def _plan(
    tiles: Sequence[Tile], table: PagedTable | None, visibility: Visibility, device: torch.device
) -> DensePlan:
    facts = facts_of(tiles, len(tiles), device)
    num_rows, num_keys = max(tile.num_rows for tile in tiles), max(map(_num_keys, tiles))
    first_key = torch.tensor([[tile.first_key] for tile in tiles])
    last_key = torch.tensor([[tile.stop_key - 1] for tile in tiles])
    request = torch.tensor(
        [[tile.span.key_start if table is None else tile.span.request] for tile in tiles]
    )
    key = first_key + torch.arange(num_keys)
    position = facts.first_position.unsqueeze(1) + torch.arange(num_rows, device=device)
    is_own = (key <= last_key).to(device)
    causal = facts.causal
    mask = see(
        position.unsqueeze(2),
        key.to(device).unsqueeze(1),
        visibility,
        key_len=facts.key_len.view(-1, 1, 1),
        causal=causal.view(-1, 1, 1) if isinstance(causal, Tensor) else causal,
        ranges=_pairs(facts.ranges),
    )
    mask = (mask & is_own.unsqueeze(1)).expand(len(tiles), num_rows, num_keys)
    return DensePlan(
        rows=TileRows.of(tiles, len(tiles), num_rows, device),
        slots=KeySlots.of(request, torch.minimum(key, last_key), table, device),
        first_key=first_key.squeeze(1).int().to(device),
        first_position=facts.first_position,
        mask=mask.contiguous(),
    )


def _pairs(ranges: Tensor | None) -> list[tuple[Tensor, Tensor]]:
    if ranges is None:
        return []
    pairs = ranges.view(*ranges.shape, 1, 1).unbind(1)
    return [(pair[:, 0], pair[:, 1]) for pair in pairs]
