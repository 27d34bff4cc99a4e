"""Prefill context parallelism: which rank computes which query tokens of a step.

A causal row costs as many keys as it sees, so that equal runs would give the last rank the most
work. Each request's tokens are therefore cut into 2 * W even pieces, of which rank r takes the
r-th and the r-th from the end: head and tail. Requests of fewer than 2 * W tokens go token by token
around the ranks, each beginning at another.

A piece of a causal request is itself a causal request, of the keys up to its last token; so every
backend serves it as it serves any batch. Keys and values are gathered: a rank sends, per step,

    M * Hkv * (D + Dv) * e * (W - 1)

bytes, with M the most tokens of any rank and e bytes per element, and writes them all to its cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from attn_shared.errors import InvalidInputError
from attn_shared.metadata import CommonAttentionMetadata

__all__ = ["Piece", "PrefillSplit", "pieces_of", "split_batch"]


class Piece(NamedTuple):
    """Query tokens [start, stop) of a request."""

    request: int
    start: int
    stop: int


def pieces_of(query_lens: Sequence[int], world_size: int) -> list[list[Piece]]:
    """Return each rank's pieces, in the order of the batch.

    Args:
        query_lens: query tokens of each request.
        world_size: ranks.

    Raises:
        InvalidInputError: the world has no rank, or a length is negative.
    """
    if world_size < 1:
        raise InvalidInputError.for_argument("world_size", world_size, "an integer >= 1")
    ranks: list[list[Piece]] = [[] for _ in range(world_size)]
    for request, length in enumerate(query_lens):
        if length < 0:
            raise InvalidInputError.for_argument(f"query_lens[{request}]", length, ">= 0")
        for rank, start, stop in _cuts(request, length, world_size):
            ranks[rank].append(Piece(request, start, stop))
    return [_joined(pieces) for pieces in ranks]


def _cuts(request: int, length: int, world_size: int) -> Iterator[tuple[int, int, int]]:
    """Yield (rank, start, stop) of one request, in its order."""
    num_pieces = 2 * world_size
    if length < num_pieces:
        for token in range(length):
            yield (request + token) % world_size, token, token + 1
        return
    for piece in range(num_pieces):
        rank = min(piece, num_pieces - 1 - piece)
        yield rank, piece * length // num_pieces, (piece + 1) * length // num_pieces


def _joined(pieces: Sequence[Piece]) -> list[Piece]:
    """Make neighbours one: the last rank's head and tail always touch."""
    joined: list[Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if last is not None and last.request == piece.request and last.stop == piece.start:
            joined[-1] = last._replace(stop=piece.stop)
        else:
            joined.append(piece)
    return joined


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PrefillSplit:
    """One rank's part of a batch.

    Attributes:
        whole: the batch.
        common: this rank's pieces of it as requests; it writes nothing.
        rows: (T_r,) int64 on the device: which rows of the whole batch this rank computes.
        most: M, the most rows of any rank.
        order: (T,) int64 on the device: where each row of the whole batch lies among the ranks'
            rows, each rank's padded to M.
    """

    whole: CommonAttentionMetadata
    common: CommonAttentionMetadata
    rows: Tensor
    most: int
    order: Tensor


def split_batch(common: CommonAttentionMetadata, world_size: int, rank: int) -> PrefillSplit:
    """Return a rank's part of a batch; nothing is read from the device.

    Args:
        common: the batch, whole.
        world_size: ranks.
        rank: this one.
    """
    every = pieces_of(common.query_lens_cpu.tolist(), world_size)
    starts = common.query_start_loc_cpu.tolist()
    rows = [_rows_of(pieces, starts) for pieces in every]
    most = max(len(own) for own in rows)
    order = torch.empty(common.num_actual_tokens, dtype=torch.int64)
    for owner, own in enumerate(rows):
        order[own] = owner * most + torch.arange(len(own))
    device = common.query_start_loc.device
    return PrefillSplit(
        whole=common,
        common=_requests(common, every[rank]),
        rows=rows[rank].to(device),
        most=most,
        order=order.to(device),
    )


def _rows_of(pieces: Sequence[Piece], starts: Sequence[int]) -> Tensor:
    first = [starts[piece.request] for piece in pieces]
    spans = [
        torch.arange(begin + piece.start, begin + piece.stop)
        for begin, piece in zip(first, pieces, strict=True)
    ]
    return torch.cat(spans) if spans else torch.zeros(0, dtype=torch.int64)


def _requests(common: CommonAttentionMetadata, pieces: Sequence[Piece]) -> CommonAttentionMetadata:
    """Describe pieces as requests: each ends at its last token, or sees all where not causal."""
    device = common.query_start_loc.device
    request = torch.tensor([piece.request for piece in pieces], dtype=torch.int64)
    on_device = request.to(device)
    lens = [piece.stop - piece.start for piece in pieces]
    starts = torch.zeros(len(pieces) + 1, dtype=torch.int32)
    starts[1:] = torch.tensor(lens, dtype=torch.int32).cumsum(0)
    behind = common.query_lens_cpu[request] - torch.tensor(
        [piece.stop for piece in pieces], dtype=torch.int32
    )
    if isinstance(common.causal, Tensor) and common.causal_cpu is not None:
        behind = torch.where(common.causal_cpu[request], behind, 0)
    elif common.causal is False:
        behind = torch.zeros_like(behind)
    on_host = common.seq_lens_cpu
    causal, causal_cpu = common.causal, common.causal_cpu
    return CommonAttentionMetadata(
        query_start_loc=starts.to(device),
        query_start_loc_cpu=starts,
        seq_lens=(common.seq_lens[on_device] - behind.to(device)).clamp_min(0).int(),
        seq_lens_cpu=None if on_host is None else (on_host[request] - behind).clamp_min(0).int(),
        seq_lens_cpu_is_exact=common.seq_lens_cpu_is_exact,
        num_reqs=len(pieces),
        num_actual_tokens=sum(lens),
        max_query_len=max(lens, default=0),
        max_seq_len=common.max_seq_len,
        block_table=None if common.block_table is None else common.block_table[on_device],
        block_size=common.block_size,
        causal=causal[on_device] if isinstance(causal, Tensor) else causal,
        causal_cpu=None if causal_cpu is None else causal_cpu[request],
        is_prefilling=None if common.is_prefilling is None else common.is_prefilling[request],
    )
