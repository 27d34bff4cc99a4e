"""Describing a batch whose sequences are sharded over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from attn_shared._fields import require_positive
from attn_shared._integer_checks import check_count, check_integers, host_lens
from attn_shared.context_parallel import local_seq_lens, local_slot_mapping
from attn_shared.errors import MetadataError
from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.ranks import ContextParallel

__all__ = ["blocks_per_rank", "sharded_batch"]


def blocks_per_rank(seq_len: int, block_size: int, place: ContextParallel) -> int:
    """Return the blocks that a rank needs at most for a sequence of `seq_len` tokens.

    Raises:
        InvalidRequestError: a length is no count.
    """
    require_positive("block_size", block_size)
    if seq_len != 0:
        require_positive("seq_len", seq_len)
    most = local_seq_lens(torch.tensor(seq_len), place.dcp_size, 0, place.interleave)
    return -(-int(most) // block_size)


def sharded_batch(
    *,
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    block_table: torch.Tensor,
    block_size: int,
    place: ContextParallel,
    device: torch.device | str = "cpu",
    **options: Any,
) -> CommonAttentionMetadata:
    """Build the description of a batch from host lengths, with this rank's slots and shares.

    Args:
        query_lens: query tokens of each request.
        seq_lens: keys of each request over all ranks, this step's included; 0 for a padded row.
        block_table: (B, M) ids of this rank's blocks, which hold its own tokens one after another.
        block_size: tokens per block.
        place: the groups of the layer.
        device: where the kernels run.
        options: further fields of `CommonAttentionMetadata`.

    Raises:
        MetadataError: lengths contradict each other, or a row has too few blocks for its share.
        UnknownNameError: an option is no field.
    """
    check_integers("block_table", block_table, 2, "(B, M)")
    if not isinstance(place, ContextParallel):
        raise MetadataError.for_argument("place", repr(place), "a ContextParallel")
    check_count("block_size", block_size)
    query_lens, seq_lens = host_lens("query_lens", query_lens), host_lens("seq_lens", seq_lens)
    if block_size % place.interleave:
        raise MetadataError.for_argument(
            "block_size", block_size, f"a multiple of interleave={place.interleave}"
        )
    _check_lens(query_lens, seq_lens, block_table)
    lens = torch.tensor(seq_lens, dtype=torch.int32)
    shares = local_seq_lens(lens, place.dcp_size, place.dcp_rank, place.interleave)
    capacity = block_table.shape[1] * block_size
    for request, share in enumerate(shares.tolist()):
        if share > capacity:
            raise MetadataError.for_argument(
                f"seq_lens[{request}]",
                seq_lens[request],
                f"of which rank {place.dcp_rank} holds {share} tokens, with {capacity} slots in "
                f"the row's {block_table.shape[1]} blocks of {block_size}",
            )
    starts = torch.zeros(len(query_lens) + 1, dtype=torch.int32)
    starts[1:] = torch.tensor(query_lens, dtype=torch.int32).cumsum(0)
    slots = local_slot_mapping(
        _with_a_column(block_table.cpu()),
        starts,
        lens,
        block_size,
        world_size=place.dcp_size,
        rank=place.dcp_rank,
        interleave=place.interleave,
    )
    if place.dcp_size > 1:
        options = {
            "dcp_local_seq_lens": shares.to(device),
            "dcp_local_seq_lens_cpu": shares,
            **options,
        }
    return CommonAttentionMetadata.from_lengths(
        query_lens=query_lens,
        seq_lens=seq_lens,
        block_table=block_table,
        block_size=block_size,
        device=device,
        slot_mapping=slots.to(device),
        **options,
    )


def _check_lens(
    query_lens: Sequence[int], seq_lens: Sequence[int], block_table: torch.Tensor
) -> None:
    if not len(query_lens) == len(seq_lens) == len(block_table):
        raise MetadataError.for_argument(
            "query_lens, seq_lens, block_table",
            f"of {len(query_lens)}, {len(seq_lens)} and {len(block_table)} requests",
            "one number of requests",
        )
    for request, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        if query_len < 0 or (seq_len != 0 and seq_len < query_len):
            raise MetadataError.for_argument(
                f"seq_lens[{request}]", seq_len, f"at least query_lens[{request}] = {query_len}"
            )


def _with_a_column(block_table: torch.Tensor) -> torch.Tensor:
    """A rank without tokens may have no blocks; others' tokens are looked up all the same."""
    if block_table.shape[1]:
        return block_table
    return block_table.new_zeros(len(block_table), 1)
