"""Chunks of earlier entries that ranks gather: whose entry comes where."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from attn_shared._dcp_batch import Shard
from attn_shared._mla_gather import Exchange, Gathering, gathered_chunks
from attn_shared.context_parallel import local_seq_lens
from attn_shared.errors import MetadataError
from attn_shared.mla_context import cut_context
from attn_shared.mla_metadata import ContextChunk

BLOCK = 4
LENS = (29, 0, 3, 64, 1)
STARTS = torch.tensor([0, 9, 10, 20, 31, 40], dtype=torch.int32)


def filled(world_size: int, rank: int, interleave: int) -> tuple[Tensor, Tensor]:
    """Return a rank's cache, whose entries tell request and position, and its table."""
    blocks = -(-max(LENS) // BLOCK)
    table = torch.arange(len(LENS) * blocks, dtype=torch.int32).view(len(LENS), blocks)
    cache = torch.full((table.numel(), BLOCK), -1)
    for request, length in enumerate(LENS):
        held = [p for p in range(length) if p // interleave % world_size == rank]
        for number, position in enumerate(held):
            cache[table[request, number // BLOCK], number % BLOCK] = 1000 * request + position
    return cache.flatten(), table


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("interleave", [1, 2, 4])
@pytest.mark.parametrize("most", [8, 4096])
@pytest.mark.parametrize("is_invariant", [False, True])
def test_every_earlier_key_comes_once(
    world_size: int, interleave: int, most: int, is_invariant: bool
) -> None:
    pieces = cut_context(LENS, most, is_invariant=is_invariant)
    by_rank: list[list[ContextChunk]] = []
    sent: list[list[Tensor]] = []
    for rank in range(world_size):
        shard = Shard(world_size=world_size, rank=rank, interleave=interleave, block_size=BLOCK)
        cache, table = filled(world_size, rank, interleave)
        chunks = list(gathered_chunks(pieces, STARTS, table, Gathering(shard=shard, group=None)))
        by_rank.append(chunks)
        sent.append([cache[chunk.slots] for chunk in chunks])
    seen: list[int] = []
    for index, chunk in enumerate(by_rank[0]):
        exchange = chunk.exchange
        assert isinstance(exchange, Exchange)
        rows = torch.full((world_size, exchange.most), -1)
        for rank in range(world_size):
            own = sent[rank][index]
            rows[rank, : len(own)] = own
            theirs = by_rank[rank][index].exchange
            assert isinstance(theirs, Exchange)
            assert theirs.most == exchange.most
            assert torch.equal(theirs.order, exchange.order)
        found = rows.flatten()[exchange.order]
        bounds = chunk.part.key_start_loc_cpu.tolist()
        assert len(found) == bounds[-1]
        for place, piece in enumerate(pairwise(bounds)):
            request = pieces[index].first + place
            assert (found[slice(*piece)] // 1000 == request).all()
        seen += found.tolist()
    wanted = [1000 * request + p for request, length in enumerate(LENS) for p in range(length)]
    assert sorted(seen) == wanted


def test_a_short_table_is_refused_with_this_ranks_share() -> None:
    shard = Shard(world_size=2, rank=0, interleave=1, block_size=BLOCK)
    table = torch.zeros(len(LENS), 7, dtype=torch.int32)
    pieces = cut_context(LENS, 4096)
    assert int(local_seq_lens(torch.tensor(64), 2, 0, 1)) == 32
    with pytest.raises(MetadataError, match=r"earlier keys of request 3 on this rank is 32.*28"):
        list(gathered_chunks(pieces, STARTS, table, Gathering(shard=shard, group=None)))
