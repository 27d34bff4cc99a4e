"""Tiles: some rows of one request with the keys that any of them sees.

A tile is one batch entry of flex_attention, so that no tile ever meets another request's keys. Its
query indices run over rows and, for each, over the query heads that share a kv head: keys are then
read once per kv head, and every ratio of heads is served alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_torch._flex_masks import TileFacts
from attn_torch._spans import Span
from attn_torch._visibility import Range, Visibility, overlapping

__all__ = ["Tile", "TileRows", "cut", "facts_of", "padded"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Rows [first_row, first_row + num_rows) of query, and keys [first_key, stop_key).

    Attributes:
        span: the request.
        first_row: of the packed batch.
        num_rows: how many.
        position: absolute position of the first row.
        first_key: the first key that any of the rows sees, or one left of it.
        stop_key: the position after the last one; > first_key.
        ranges: multimodal ranges that hold one of the rows.
    """

    span: Span
    first_row: int
    num_rows: int
    position: int
    first_key: int
    stop_key: int
    ranges: tuple[Range, ...]


def cut(span: Span, visibility: Visibility, max_rows: int) -> list[Tile]:
    """Return the tiles of a span, each of at most `max_rows` rows."""
    firsts = range(0, span.query_len, max_rows)
    return [
        _tile(span, visibility, first, min(max_rows, span.query_len - first)) for first in firsts
    ]


def _tile(span: Span, visibility: Visibility, first: int, num_rows: int) -> Tile:
    top = span.position + first
    bottom = top + num_rows - 1
    ranges = overlapping(span.ranges, top, bottom)
    first_key = visibility.first_key(top)
    stop_key = visibility.last_key(bottom, span.key_len, is_causal=span.is_causal) + 1
    for start, end in ranges:
        first_key, stop_key = min(first_key, start), max(stop_key, end + 1)
    return Tile(
        span=span,
        first_row=span.query_start + first,
        num_rows=num_rows,
        position=top,
        first_key=first_key,
        stop_key=min(stop_key, span.key_len),
        ranges=ranges,
    )


def padded(count: int) -> int:
    """Return the next power of two from 2 on.

    Sizes that a compiled call sees are padded, so that it meets few of them; 1 is never among
    them, because torch.compile gives the size 1 a graph of its own.
    """
    return max(2, 1 << (count - 1).bit_length())


def facts_of(tiles: Sequence[Tile], num_slots: int, device: torch.device) -> TileFacts:
    """Return what masks have to know of the tiles; slots past them belong to nobody."""
    num_ranges = max((len(tile.ranges) for tile in tiles), default=0)
    ranges = None
    if num_ranges:
        empty = (1, 0)
        width = padded(num_ranges)
        rows = [[*tile.ranges] + [empty] * (width - len(tile.ranges)) for tile in tiles]
        rows += [[empty] * width] * (num_slots - len(tiles))
        ranges = torch.tensor(rows, dtype=torch.int32).to(device)
    return TileFacts(
        first_position=_column((tile.position for tile in tiles), num_slots, device),
        key_len=_column((tile.span.key_len for tile in tiles), num_slots, device),
        causal=_causal_of(tiles, num_slots, device),
        ranges=ranges,
    )


def _causal_of(tiles: Sequence[Tile], num_slots: int, device: torch.device) -> bool | Tensor:
    flags = [tile.span.is_causal for tile in tiles]
    if len(set(flags)) < 2:
        return all(flags)
    return _column(flags, num_slots, device).bool()


def _column(values: Iterable[int], num_slots: int, device: torch.device) -> Tensor:
    column = torch.zeros(num_slots, dtype=torch.int32)
    numbers = torch.tensor(list(values), dtype=torch.int32)
    column[: len(numbers)] = numbers
    return column.to(device)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TileRows:
    """How rows of the packed batch move into n tiles of R rows, and back.

    Attributes:
        rows: (n * R,) int64: the row of query in each place; places past a tile's rows repeat its
            last one, so that nothing outside the request is read.
        places: (S,) int64: the place of each row that is served.
        served: (S,) int64: those rows.
        num_tiles: n.
        num_rows: R.
    """

    rows: Tensor
    places: Tensor
    served: Tensor
    num_tiles: int
    num_rows: int

    @classmethod
    def of(
        cls, tiles: Sequence[Tile], num_slots: int, num_rows: int, device: torch.device
    ) -> TileRows:
        """Lay tiles into `num_slots` slots of `num_rows` rows; slots past them repeat row 0."""
        first = torch.zeros(num_slots, 1, dtype=torch.int64)
        count = torch.ones(num_slots, 1, dtype=torch.int64)
        first[: len(tiles), 0] = torch.tensor([tile.first_row for tile in tiles])
        count[: len(tiles), 0] = torch.tensor([tile.num_rows for tile in tiles])
        offset = torch.arange(num_rows)
        rows = first + torch.minimum(offset, count - 1)
        places = (offset < count)[: len(tiles)].flatten().nonzero().squeeze(1)
        rows = rows.flatten()
        return cls(
            rows=rows.to(device),
            places=places.to(device),
            served=rows[places].to(device),
            num_tiles=num_slots,
            num_rows=num_rows,
        )

    def take(self, query: Tensor, num_kv_heads: int) -> Tensor:
        """Return (n, Hkv, R * G, D) of query (T, Hq, D), dense."""
        head_size = query.shape[-1]
        taken = query[self.rows].view(self.num_tiles, self.num_rows, num_kv_heads, -1, head_size)
        return taken.permute(0, 2, 1, 3, 4).flatten(2, 3).contiguous()

    def put(self, result: Tensor, output: Tensor) -> None:
        """Write result (n, Hkv, R * G, Dv) into the served rows of output (T, Hq, Dv)."""
        output.index_copy_(0, self.served, self._by_row(result).to(output.dtype))

    def put_lse(self, result: Tensor, lse: Tensor) -> None:
        """Write result (n, Hkv, R * G) into the served columns of lse (Hq, T)."""
        by_row = self._by_row(result.unsqueeze(-1)).squeeze(-1)
        lse.index_copy_(1, self.served, by_row.T.to(lse.dtype))

    def _by_row(self, result: Tensor) -> Tensor:
        """Return (S, Hq, width) of (n, Hkv, R * G, width)."""
        tiles, heads, _, width = result.shape
        parts = result.view(tiles, heads, self.num_rows, -1, width).permute(0, 2, 1, 3, 4)
        return parts.reshape(tiles * self.num_rows, -1, width)[self.places]
