"""A batch over sharded sequences, as batches over one rank's keys that any backend serves.

What a rank holds of a sequence are tokens at every world_size-th run of `interleave` positions. The
keys that a query row sees, [low, high] by absolute position, are therefore a run of the rank's own
tokens: those numbered from count(low) to count(high + 1), where count(p) is how many of the first p
positions the rank holds. A row of its own, with a table that starts at the block of the first and a
length that ends at the last, is an ordinary decode; positions are gone, and with them causality.

    short rows    a request per query row: decodes and their drafts, and rows with a window
    long rows     a prefill in tiles: per tile one request without a causal mask over the keys
                  before the tile, and per row one over the tile's own keys

A tile begins at a multiple of world_size * block_size, where every rank begins a block. Of a
window, whose left end may lie inside a block, the rank sees one of at most interleave + 1 widths:
each is a part of its own, for a layer with that window.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from attn_shared.context_parallel import local_seq_lens
from attn_shared.errors import MetadataError
from attn_shared.metadata import CommonAttentionMetadata

__all__ = ["SHORT_ROWS", "Shard", "ShardPart", "shard_parts"]

SHORT_ROWS = 8
"""Longest query that is cut into rows, each of which reads the keys once more."""

_TILE_ROWS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """What a rank holds of each sequence.

    Attributes:
        world_size: ranks that share each sequence.
        rank: this one.
        interleave: consecutive tokens that one rank holds.
        block_size: tokens per block of its cache.
    """

    world_size: int
    rank: int
    interleave: int
    block_size: int

    def count(self, positions: Tensor) -> Tensor:
        """Return how many of the first `positions` tokens of a sequence this rank holds."""
        return local_seq_lens(positions, self.world_size, self.rank, self.interleave)

    def widths(self, num_keys: int) -> range:
        """Return how many of `num_keys` consecutive tokens this rank can hold."""
        rounds, rest = divmod(num_keys, self.world_size * self.interleave)
        fewest = max(0, rest - (self.world_size - 1) * self.interleave)
        most = min(self.interleave, rest)
        return range(rounds * self.interleave + fewest, rounds * self.interleave + most + 1)

    @property
    def tile(self) -> int:
        """Rows of a tile: a multiple of world_size * block_size."""
        unit = self.world_size * self.block_size
        return -(-_TILE_ROWS // unit) * unit


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardPart:
    """Some rows of the query over some of this rank's keys: an ordinary batch.

    Attributes:
        common: the batch that a backend is given.
        rows: (R,) int64 on the device, the rows of the query; None: all, in their order.
        window: how many keys of the rank's own, up to the last, each row sees; None: all.
    """

    common: CommonAttentionMetadata
    rows: Tensor | None
    window: int | None


class _Rows(NamedTuple):
    """Query rows as (R,) tensors: their request, and how far before its end they stand.

    `reach` is the last position that a multimodal range opens to the row, or -1; `is_causal` is
    None where every row is.
    """

    request: Tensor
    back: Tensor
    reach: Tensor | None
    is_causal: Tensor | None

    def to(self, device: torch.device) -> _Rows:
        moved = (None if each is None else each.to(device) for each in self)
        return _Rows(*moved)  # type: ignore[arg-type]

    def at(self, index: Tensor) -> _Rows:
        return _Rows(*(None if each is None else each[index] for each in self))  # type: ignore[arg-type]


class _Seen(NamedTuple):
    """The own keys that each row sees, as (R,) int32: `hidden` come before them, `stop` ends."""

    hidden: Tensor
    stop: Tensor


def shard_parts(
    common: CommonAttentionMetadata,
    shard: Shard,
    *,
    left: int | None = None,
    may_tile: bool = True,
) -> list[ShardPart]:
    """Return the ordinary batches that together are one rank's share of a batch.

    Every row is in some part, and in at most one part over the same keys; results of the parts are
    merged by their LSE. Nothing is read from the device.

    Args:
        common: the batch, with whole lengths and this rank's block table.
        shard: which tokens this rank holds.
        left: keys of the window beside the query's own; None is unbounded.
        may_tile: long rows may be cut into tiles; else each row is a request.

    Raises:
        MetadataError: there is no block table, or multimodal ranges without exact host lengths.
    """
    if common.block_table is None:
        raise MetadataError.for_argument("block_table", None, "(num_reqs, M) int32")
    is_exact = common.seq_lens_cpu is not None and common.seq_lens_cpu_is_exact
    rows = _rows_of(common)
    if left is not None:
        return _windowed(common, shard, rows, left)
    is_long = common.query_lens_cpu[rows.request] > SHORT_ROWS
    if not (may_tile and is_exact and bool(is_long.any())):
        return [_single_rows(common, shard, rows)]
    parts = _tiled(common, shard, rows)
    short = (~is_long).nonzero().squeeze(1)
    if len(short):
        parts.insert(0, _single_rows(common, shard, rows.at(short), short))
    return parts


def _rows_of(common: CommonAttentionMetadata) -> _Rows:
    """Return every query row, on the host."""
    lens = common.query_lens_cpu.long()
    request = torch.repeat_interleave(torch.arange(len(lens)), lens)
    stops = common.query_start_loc_cpu[1:].long()
    back = stops[request] - torch.arange(len(request))
    is_causal = None
    if isinstance(common.causal, Tensor) and common.causal_cpu is not None:
        is_causal = common.causal_cpu[request]
    elif common.causal is False:
        is_causal = torch.zeros(len(request), dtype=torch.bool)
    return _Rows(request, back, _reach(common, request, back), is_causal)


def _reach(common: CommonAttentionMetadata, request: Tensor, back: Tensor) -> Tensor | None:
    if not any(common.mm_prefix_ranges.values()):
        return None
    lens = common.exact_seq_lens_cpu.long()[request]
    position = lens - back
    reach = torch.full_like(back, -1)
    for index, ranges in common.mm_prefix_ranges.items():
        for start, end in ranges:
            inside = (request == index) & (position >= start) & (position <= end)
            reach = torch.where(inside, reach.clamp_min(end), reach)
    return torch.minimum(reach, lens - 1)


def _seen(rows: _Rows, seq_lens: Tensor, shard: Shard, left: int | None = None) -> _Seen:
    """Return what rows see; `seq_lens` (B,) is where the rows are."""
    lens = seq_lens[rows.request]
    position = lens - rows.back
    last = position
    if rows.is_causal is not None:
        last = torch.where(rows.is_causal, position, lens - 1)
    if rows.reach is not None:
        last = torch.maximum(last, rows.reach)
    stop = shard.count((last + 1).clamp_min(0))
    hidden = torch.zeros_like(stop) if left is None else shard.count((position - left).clamp_min(0))
    return _Seen(hidden.int(), stop.int())


def _single_rows(
    common: CommonAttentionMetadata, shard: Shard, rows: _Rows, index: Tensor | None = None
) -> ShardPart:
    """Return a part of one request per row, over all that the row sees."""
    device = common.query_start_loc.device
    stop = _seen(rows.to(device), common.seq_lens, shard).stop
    on_host = None
    if common.seq_lens_cpu is not None:
        on_host = _seen(rows, common.seq_lens_cpu, shard).stop
    table = common.block_table
    if table is not None and not torch.equal(rows.request, torch.arange(common.num_reqs)):
        table = table[rows.request.to(device)]
    return ShardPart(
        common=_requests(common, shard, torch.ones(len(stop)), stop, on_host, table),
        rows=None if index is None else index.to(device),
        window=None,
    )


def _windowed(
    common: CommonAttentionMetadata, shard: Shard, rows: _Rows, left: int
) -> list[ShardPart]:
    """Return a part for each number of keys that a row's window can leave to this rank.

    Where the host knows the lengths, a part has the rows of its width alone; else it has all, and
    those of another width see no key in it.
    """
    is_exact = common.seq_lens_cpu is not None and common.seq_lens_cpu_is_exact
    widths: list[int | None] = [None, *(width for width in shard.widths(left + 1) if width)]
    found = []
    on_host = None
    if is_exact and common.seq_lens_cpu is not None:
        on_host = _seen(rows, common.seq_lens_cpu, shard, left)
    for width in widths:
        index, part_rows = None, rows
        if on_host is not None:
            index = _of_width(on_host, width).nonzero().squeeze(1)
            if not len(index) and not (width is None and not len(rows.request)):
                continue
            part_rows = rows.at(index)
        found.append(_of_one_width(common, shard, part_rows, index, left, width))
    return found or [_of_one_width(common, shard, rows, None, left, None)]


def _of_width(seen: _Seen, width: int | None) -> Tensor:
    if width is None:
        return seen.hidden == 0
    return (seen.hidden > 0) & (seen.stop - seen.hidden == width)


def _of_one_width(
    common: CommonAttentionMetadata,
    shard: Shard,
    rows: _Rows,
    index: Tensor | None,
    left: int,
    width: int | None,
) -> ShardPart:
    device = common.query_start_loc.device
    on_device = rows.to(device)
    seen = _seen(on_device, common.seq_lens, shard, left)
    stop = torch.where(_of_width(seen, width), seen.stop, 0)
    skipped = seen.hidden // shard.block_size
    kept = (stop - skipped * shard.block_size).clamp_min(0)
    most = left + 1 if width is None else width + shard.block_size
    table = _cut_table(common, shard, on_device.request, skipped, most)
    host = None
    if common.seq_lens_cpu is not None and index is not None:
        host_seen = _seen(rows, common.seq_lens_cpu, shard, left)
        host_skipped = host_seen.hidden // shard.block_size
        host = host_seen.stop - host_skipped * shard.block_size
    return ShardPart(
        common=_requests(common, shard, torch.ones(len(kept)), kept, host, table, most=most),
        rows=None if index is None else index.to(device),
        window=width,
    )


def _cut_table(
    common: CommonAttentionMetadata, shard: Shard, request: Tensor, skipped: Tensor, most: int
) -> Tensor:
    """Return (R, N): of each row's blocks those from the `skipped`-th on, for `most` keys."""
    if common.block_table is None:
        raise MetadataError.for_argument("block_table", None, "(num_reqs, M) int32")
    width = common.block_table.shape[1]
    if not width:
        return common.block_table[request]
    num_blocks = min(width, -(-most // shard.block_size))
    columns = skipped.long().unsqueeze(1) + torch.arange(num_blocks, device=skipped.device)
    return common.block_table[request.unsqueeze(1), columns.clamp_max(width - 1)]


class _Tile(NamedTuple):
    """Rows [first, stop) of the query, at positions from `start` on but for the first `skip`."""

    request: int
    first: int
    stop: int
    start: int


def _tiled(common: CommonAttentionMetadata, shard: Shard, rows: _Rows) -> list[ShardPart]:
    """Return the parts of the long rows: what lies before their tiles, and their tiles."""
    lens = common.exact_seq_lens_cpu
    tiles = list(_tiles_of(common, shard, rows))
    before = [tile for tile in tiles if tile.start]
    parts = []
    own = [tile for tile in tiles if _is_causal(rows, tile)]
    if own:
        index = torch.cat([torch.arange(tile.first, tile.stop) for tile in own])
        start = torch.cat([torch.full((tile.stop - tile.first,), tile.start) for tile in own])
        picked = rows.at(index)
        earlier = shard.count(start).int()
        stop = _seen(picked, lens, shard).stop - earlier
        device = common.query_start_loc.device
        table = _cut_table(
            common,
            shard,
            picked.request.to(device),
            (earlier // shard.block_size).to(device),
            max(int(stop.max()), 1),
        )
        tile_batch = _requests(common, shard, torch.ones(len(index)), stop.to(device), stop, table)
        parts.append(ShardPart(common=tile_batch, rows=index.to(device), window=None))
    if before:
        parts.append(_before_tiles(common, shard, before))
    return parts


def _is_causal(rows: _Rows, tile: _Tile) -> bool:
    return rows.is_causal is None or bool(rows.is_causal[tile.first])


def _tiles_of(common: CommonAttentionMetadata, shard: Shard, rows: _Rows) -> Iterator[_Tile]:
    """Yield the tiles of each long request; one without a causal mask is one, after all keys."""
    lens = common.exact_seq_lens_cpu.tolist()
    unit = shard.world_size * shard.block_size
    for request, (first, stop) in enumerate(pairwise(common.query_start_loc_cpu.tolist())):
        if stop - first <= SHORT_ROWS:
            continue
        whole = _Tile(request, first, stop, lens[request])
        if not _is_causal(rows, whole):
            yield whole
            continue
        position = lens[request] - (stop - first)
        start = max(position, 0) // unit * unit
        row = first
        while row < stop:
            end = min(stop, first + start + shard.tile - position)
            yield _Tile(request, row, end, start)
            row, start = end, start + shard.tile


def _before_tiles(common: CommonAttentionMetadata, shard: Shard, tiles: list[_Tile]) -> ShardPart:
    """Return a part of one request per tile, without a causal mask, over the keys before it."""
    # Short ones first, for builders that want decodes before all else.
    tiles = sorted(tiles, key=lambda tile: tile.stop - tile.first)
    device = common.query_start_loc.device
    index = torch.cat([torch.arange(tile.first, tile.stop) for tile in tiles])
    query_lens = torch.tensor([tile.stop - tile.first for tile in tiles])
    stop = shard.count(torch.tensor([tile.start for tile in tiles])).int()
    request = torch.tensor([tile.request for tile in tiles])
    table = None if common.block_table is None else common.block_table[request.to(device)]
    batch = _requests(common, shard, query_lens, stop.to(device), stop, table, causal=False)
    return ShardPart(common=batch, rows=index.to(device), window=None)


def _requests(
    common: CommonAttentionMetadata,
    shard: Shard,
    query_lens: Tensor,
    seq_lens: Tensor,
    seq_lens_cpu: Tensor | None,
    block_table: Tensor | None,
    *,
    causal: bool = True,
    most: int | None = None,
) -> CommonAttentionMetadata:
    """Describe requests of this rank's keys, which write nothing.

    `seq_lens_cpu` is as exact as the batch's own; `most` bounds the lengths where there is none.
    """
    starts = torch.zeros(len(query_lens) + 1, dtype=torch.int32)
    starts[1:] = query_lens.int().cumsum(0)
    if seq_lens_cpu is not None:
        longest = int(seq_lens_cpu.max()) if len(seq_lens_cpu) else 0
    else:
        # Rank 0 holds as much of any sequence as a rank can.
        bound = torch.tensor([common.max_seq_len])
        longest = int(local_seq_lens(bound, shard.world_size, 0, shard.interleave))
        longest = longest if most is None else min(longest, most)
    return CommonAttentionMetadata(
        query_start_loc=starts.to(common.query_start_loc.device),
        query_start_loc_cpu=starts,
        seq_lens=seq_lens.int(),
        seq_lens_cpu=seq_lens_cpu,
        seq_lens_cpu_is_exact=common.seq_lens_cpu_is_exact,
        num_reqs=len(query_lens),
        num_actual_tokens=int(starts[-1]),
        max_query_len=int(query_lens.max()) if len(query_lens) else 0,
        max_seq_len=longest,
        block_table=block_table,
        block_size=shard.block_size,
        causal=causal,
    )
