"""Prefills over a cache of latents that ranks share: entries of all ranks, a chunk at a time.

A rank has a share of a request's entries. Absorbed, a long prefill would send its queries, of all
heads, and its outputs in float32; an entry is 1,152 bytes for DeepSeek, whatever the heads. So the
entries of earlier steps are gathered, as many as are expanded at once, and each rank prefills with
its own heads, as a rank alone does. Keys that every row sees may come in any order: a request's are
those of rank 0, then those of rank 1, and so on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_shared._dcp_batch import Shard
from attn_shared.context_parallel import local_seq_lens, single_collective
from attn_shared.errors import MetadataError
from attn_shared.mla_context import ContextPieces, prefix_sums, ragged_part, slots_of
from attn_shared.mla_metadata import ContextChunk

__all__ = ["Exchange", "Gathering", "gathered_chunks"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Gathering:
    """Who shares a cache, and how.

    Attributes:
        shard: what this rank holds.
        group: the ranks.
    """

    shard: Shard
    group: Any


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Exchange:
    """One chunk's entries: each rank gives its own and gets all.

    Attributes:
        group: the ranks.
        world_size: of them.
        most: entries of the rank that has most of them; as many are sent by each.
        order: (n,) int64 on the device: where each key is in what was gathered.
    """

    group: Any
    world_size: int
    most: int
    order: Tensor

    def __call__(self, entries: Tensor) -> Tensor:
        """Return the chunk's entries (n, latent_size) from this rank's own (m, latent_size)."""
        sent = entries.new_zeros(self.most, entries.shape[1])
        sent[: len(entries)] = entries
        every = entries.new_empty(self.world_size * self.most, entries.shape[1])
        gather = single_collective("all_gather_single", "all_gather_into_tensor")
        gather(every, sent, group=self.group)
        return every.index_select(0, self.order)


def gathered_chunks(
    pieces: Sequence[ContextPieces],
    query_start_loc_cpu: Tensor,
    block_table: Tensor,
    gathering: Gathering,
) -> Iterator[ContextChunk]:
    """Lay chunks out as `mla_context.context_chunks` does, their slots those of this rank's share.

    Args:
        pieces: of the requests that the other arguments describe, the same on all ranks.
        query_start_loc_cpu: (B + 1,) int32.
        block_table: (B, M) int32, this rank's.
        gathering: who shares the cache.

    Raises:
        MetadataError: a row of the table is too short for this rank's share.
    """
    shard, device = gathering.shard, block_table.device
    for chunk in pieces:
        starts = query_start_loc_cpu[chunk.first : chunk.stop + 1]
        rows = slice(int(starts[0]), int(starts[-1]))
        begins, shares = _shares(chunk, shard)
        own = ContextPieces(
            first=chunk.first,
            starts=tuple(begins[shard.rank].tolist()),
            lens=tuple(shares[shard.rank].tolist()),
        )
        _check_reach(own, block_table, shard.block_size)
        table = block_table[chunk.first : chunk.stop]
        most = int(shares.sum(1).max())
        yield ContextChunk(
            rows=rows,
            part=ragged_part(starts - starts[0], prefix_sums(chunk.lens), device, is_causal=False),
            slots=slots_of(own, prefix_sums(own.lens), table, shard.block_size),
            exchange=Exchange(
                group=gathering.group,
                world_size=shard.world_size,
                most=most,
                order=_order(shares, most).to(device, non_blocking=True),
            ),
        )


def _shares(chunk: ContextPieces, shard: Shard) -> tuple[Tensor, Tensor]:
    """Return (W, R): the number of each piece's first token on each rank, and of its tokens."""
    first = torch.tensor(chunk.starts, dtype=torch.int64)
    stop = first + torch.tensor(chunk.lens, dtype=torch.int64)
    counts = [
        torch.stack(
            [
                local_seq_lens(ends, shard.world_size, rank, shard.interleave)
                for rank in range(shard.world_size)
            ]
        )
        for ends in (first, stop)
    ]
    return counts[0], counts[1] - counts[0]


def _order(shares: Tensor, most: int) -> Tensor:
    """Return (n,): request by request, each rank's entries among those that all of them sent."""
    offsets = shares.cumsum(1) - shares
    pieces = [
        torch.arange(int(shares[rank, request])) + rank * most + int(offsets[rank, request])
        for request in range(shares.shape[1])
        for rank in range(len(shares))
    ]
    return torch.cat(pieces)


def _check_reach(own: ContextPieces, block_table: Tensor, block_size: int) -> None:
    reach = block_table.shape[1] * block_size
    for index, (start, length) in enumerate(zip(own.starts, own.lens, strict=True)):
        if length and start + length > reach:
            raise MetadataError.for_argument(
                f"earlier keys of request {own.first + index} on this rank",
                start + length,
                f"at most {reach}, what block_table has",
            )
