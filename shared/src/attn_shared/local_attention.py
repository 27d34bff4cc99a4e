"""Chunked local attention as ordinary attention: one virtual request per chunk.

A query sees the keys of its own chunk up to itself. Cut where chunks begin, a request becomes
several that are plainly causal, so that a kernel that knows nothing of chunks serves it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

import torch

from attn_shared.argument_checks import require_count, require_kind
from attn_shared.errors import InvalidInputError, MetadataError, UnsupportedOptionError
from attn_shared.metadata import CommonAttentionMetadata

__all__ = ["make_local_attention_virtual_batches"]


class _Virtual(NamedTuple):
    """One chunk's share of a request."""

    request: int
    first_block: int
    query_len: int
    seq_len: int


def make_local_attention_virtual_batches(
    common: CommonAttentionMetadata, chunk_size: int, block_size: int
) -> CommonAttentionMetadata:
    """Return the batch whose plain causal attention is the chunked attention of `common`.

    Query rows and slots stay where they are. Each request becomes as many as chunks its queries
    touch, at least one, so that a batch of single-token decodes keeps its size. A virtual row of
    the block table has chunk_size / block_size entries; those that the request's own row does not
    have repeat its last used one, and are not read.

    Args:
        common: the batch; causal, over a paged cache, with exact host lengths.
        chunk_size: tokens per chunk of absolute positions.
        block_size: tokens per block.

    Raises:
        InvalidInputError: the chunk is not a whole number of blocks.
        MetadataError: lengths are inexact or contradict each other or the table.
        UnsupportedOptionError: the batch is not causal or has what chunks have no rule for.
    """
    require_kind("common", common, CommonAttentionMetadata)
    require_count("block_size", block_size)
    require_count("chunk_size", chunk_size)
    if chunk_size % block_size:
        raise InvalidInputError.for_argument(
            "chunk_size", chunk_size, f"a multiple of block_size={block_size}"
        )
    table = _check_batch(common)
    lens = list(
        zip(common.query_lens_cpu.tolist(), common.exact_seq_lens_cpu.tolist(), strict=True)
    )
    _check_lens(lens, table.shape[1] * block_size)
    virtual = [
        part
        for request, (query_len, seq_len) in enumerate(lens)
        for part in _chunks(request, query_len, seq_len, chunk_size, block_size)
    ]
    return _describe(common, virtual, table, chunk_size // block_size, block_size)


def _check_batch(common: CommonAttentionMetadata) -> torch.Tensor:
    if common.block_table is None:
        raise MetadataError.for_argument("block_table", None, "a table, for virtual requests")
    unserved = {
        "a row that is not causal": not _is_causal(common),
        "multimodal ranges": any(common.mm_prefix_ranges.values()),
        "encoder_seq_lens": common.encoder_seq_lens is not None,
        "dcp_local_seq_lens": common.dcp_local_seq_lens is not None,
    }
    for what, is_present in unserved.items():
        if is_present:
            raise UnsupportedOptionError(
                f"chunked local attention has no rule for {what}.",
                hint="run such a batch through layers without chunk_size.",
            )
    return common.block_table


def _is_causal(common: CommonAttentionMetadata) -> bool:
    if common.causal_cpu is not None:
        return bool(common.causal_cpu.all())
    return common.causal is True


def _check_lens(lens: list[tuple[int, int]], capacity: int) -> None:
    for index, (query_len, seq_len) in enumerate(lens):
        if seq_len != 0 and not query_len <= seq_len <= capacity:
            raise MetadataError.for_argument(
                f"seq_lens[{index}]",
                seq_len,
                f"{query_len} (the query length) to {capacity} (the table's row), or 0 for padding",
            )


def _chunks(
    request: int, query_len: int, seq_len: int, chunk_size: int, block_size: int
) -> Iterator[_Virtual]:
    """Yield the parts of one request; a request without keys or queries is one empty part."""
    if seq_len == 0 or query_len == 0:
        yield _Virtual(request, 0, query_len, 0)
        return
    first_query = seq_len - query_len
    for start in range(first_query - first_query % chunk_size, seq_len, chunk_size):
        stop = min(start + chunk_size, seq_len)
        yield _Virtual(request, start // block_size, stop - max(start, first_query), stop - start)


def _describe(
    common: CommonAttentionMetadata,
    virtual: list[_Virtual],
    table: torch.Tensor,
    width: int,
    block_size: int,
) -> CommonAttentionMetadata:
    query_lens = [part.query_len for part in virtual]
    starts = torch.tensor([0, *accumulate(query_lens)], dtype=torch.int32)
    lens = torch.tensor([part.seq_len for part in virtual], dtype=torch.int32)
    request = torch.tensor([part.request for part in virtual], dtype=torch.int64)
    first_block = torch.tensor([part.first_block for part in virtual], dtype=torch.int64)
    num_blocks = (lens.long() + block_size - 1) // block_size
    offset = torch.minimum(torch.arange(width), (num_blocks - 1).clamp_min(0).unsqueeze(1))
    column = first_block.unsqueeze(1) + offset
    return common.with_fields(
        num_reqs=len(virtual),
        query_start_loc=starts.to(table.device),
        query_start_loc_cpu=starts,
        seq_lens=lens.to(table.device),
        seq_lens_cpu=lens,
        max_query_len=max(query_lens, default=0),
        max_seq_len=int(lens.max()) if virtual else 0,
        block_table=_gather(table, request, column),
        causal=True,
        causal_cpu=None,
        is_prefilling=None if common.is_prefilling is None else common.is_prefilling[request],
    )


def _gather(table: torch.Tensor, request: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
    """Return table[request, column]; a table without columns belongs to padding alone."""
    if table.shape[1] == 0:
        return table.new_zeros(column.shape)
    return table[request.unsqueeze(1).to(table.device), column.to(table.device)]
