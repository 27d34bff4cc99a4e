"""A batch as the ops take it: host tensors, checked against each other."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attn_shared.errors import MetadataError
from attn_shared.metadata import CommonAttentionMetadata, MMPrefixRanges
from attn_shared.request import AttentionType
from attn_shared.served import require_block_table

__all__ = ["CACHE_FREE", "HostBatch", "usable_table"]

CACHE_FREE = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)
"""Kinds of attention whose keys and values come with the call."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HostBatch:
    """Lengths and rules of each request.

    On a CPU what a batch calls its device's tensors lies on the host: the exact lengths are there
    whatever the batch says of its mirrors.

    Attributes:
        query_start_loc: (B + 1,) int32.
        key_lens: (B,) int32.
        key_start_loc: (B + 1,) int32 where the call brings the keys, else None.
        block_table: (B, M) int32 with dense rows, or None.
        is_causal: whether all requests are, where `causal_per_request` is None.
        causal_per_request: (B,) bool, or None.
        ranges: (N, 3) int32 of request, start, end (inclusive), or None.
        num_tokens: query rows that belong to requests.
        num_keys: keys that the call brings; 0 with a cache.
    """

    query_start_loc: Tensor
    key_lens: Tensor
    key_start_loc: Tensor | None
    block_table: Tensor | None
    is_causal: bool
    causal_per_request: Tensor | None
    ranges: Tensor | None
    num_tokens: int
    num_keys: int

    @classmethod
    def of(
        cls, common: CommonAttentionMetadata, attn_type: AttentionType, block_size: int | None
    ) -> HostBatch:
        """Read and check a batch.

        Encoders and cross-attention see every key: for them `common.causal` has no meaning.

        Args:
            common: the batch.
            attn_type: of the layers.
            block_size: tokens per block; None where the call brings the keys.

        Raises:
            MetadataError: lengths are missing or contradict each other, or exceed the block table.
        """
        starts = _starts("query_start_loc", common.query_start_loc)
        key_starts = table = None
        if attn_type in CACHE_FREE:
            key_starts = _key_starts(common, starts)
            lens = key_starts.diff()
        else:
            lens = _cached_lens(common, attn_type)
            table = usable_table(require_block_table(common), lens, block_size)
        is_decoder = attn_type is AttentionType.DECODER
        causal = common.causal if is_decoder else False
        is_per_request = isinstance(causal, Tensor)
        return cls(
            query_start_loc=starts,
            key_lens=lens,
            key_start_loc=key_starts,
            block_table=table,
            is_causal=bool(causal) if not is_per_request else True,
            causal_per_request=causal if isinstance(causal, Tensor) else None,
            ranges=_ranges(common.mm_prefix_ranges, common.num_reqs, attn_type),
            num_tokens=common.num_actual_tokens,
            num_keys=0 if key_starts is None else int(key_starts[-1]),
        )


def _starts(name: str, starts: Tensor) -> Tensor:
    values = starts.tolist()  # a few numbers are compared faster than tensors are called for
    if not values or values[0] != 0 or values != sorted(values):
        raise MetadataError.for_argument(name, values, "prefix sums from 0 that never fall")
    return starts.contiguous()


def _key_starts(common: CommonAttentionMetadata, query_starts: Tensor) -> Tensor:
    if common.key_start_loc is None:
        return query_starts
    return _starts("key_start_loc", common.key_start_loc)


def _cached_lens(common: CommonAttentionMetadata, attn_type: AttentionType) -> Tensor:
    name, lens = "seq_lens", common.seq_lens
    if attn_type is AttentionType.ENCODER_DECODER:
        name = "encoder_seq_lens"
        if common.encoder_seq_lens is None:
            raise MetadataError.for_argument(name, None, "(num_reqs,) int32, for cross-attention")
        lens = common.encoder_seq_lens
    values = lens.tolist()
    if min(values, default=0) < 0:
        raise MetadataError.for_argument(name, values, "lengths >= 0")
    return lens.contiguous()


def usable_table(block_table: Tensor, key_lens: Tensor, block_size: int | None) -> Tensor:
    """Return a table with dense rows that address every key.

    Args:
        block_table: (B, M) int32.
        key_lens: (B,) int32.
        block_size: tokens per block.

    Raises:
        MetadataError: it lies elsewhere, has another number of rows, or a row is too short; names
            the request.
    """
    if not block_table.is_cpu:
        raise MetadataError.for_argument("block_table device", block_table.device, "cpu")
    shape, values = block_table.shape, key_lens.tolist()
    if len(shape) != 2 or shape[0] != len(values):
        raise MetadataError.for_argument("block_table shape", tuple(shape), f"({len(values)}, M)")
    reach, longest = shape[1] * (block_size or 0), max(values, default=0)
    if longest > reach:
        raise MetadataError.for_argument(
            f"key length of request {values.index(longest)}",
            longest,
            f"at most {reach}, what a row of block_table addresses",
        )
    return block_table.contiguous()


def _ranges(given: MMPrefixRanges, num_reqs: int, attn_type: AttentionType) -> Tensor | None:
    """Return the ranges as rows, or None where there are none."""
    rows = [(request, *pair) for request, pairs in given.items() for pair in pairs]
    if not rows:
        return None
    if attn_type is not AttentionType.DECODER:
        raise MetadataError.for_argument(
            "mm_prefix_ranges", dict(given), f"none with attn_type={attn_type}"
        )
    for request, start, end in rows:
        if not 0 <= request < num_reqs:
            raise MetadataError.for_argument(
                "mm_prefix_ranges", f"keyed by {request}", f"requests below {num_reqs}"
            )
        if not 0 <= start <= end:
            raise MetadataError.for_argument(
                "mm_prefix_ranges", (start, end), "(start, end), inclusive, 0 <= start <= end"
            )
    return torch.tensor(rows, dtype=torch.int32)
