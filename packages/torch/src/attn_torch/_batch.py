"""A batch as host integers, checked: what a plan is made from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from attn_shared.errors import MetadataError
from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.request import AttentionType
from attn_torch._visibility import Range

__all__ = ["CACHE_FREE", "HostBatch"]

CACHE_FREE = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)
"""Kinds of attention whose keys and values come with the call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostBatch:
    """Lengths and rules of each request.

    Attributes:
        query_starts: (B + 1,) prefix sums of query lengths.
        key_lens: (B,) keys.
        key_starts: (B + 1,) prefix sums of key_lens where the call brings the keys, else empty.
        is_causal: (B,).
        ranges: (B,) multimodal ranges, or empty where no request has any.
    """

    query_starts: Sequence[int]
    key_lens: Sequence[int]
    key_starts: Sequence[int]
    is_causal: Sequence[bool]
    ranges: Sequence[Sequence[Range]]

    @classmethod
    def of(
        cls, common: CommonAttentionMetadata, attn_type: AttentionType, block_size: int | None
    ) -> HostBatch:
        """Read and check what the host knows of a batch.

        Encoders and cross-attention see every key: for them `common.causal` has no meaning.

        Args:
            common: the batch.
            attn_type: of the layers.
            block_size: tokens per block; None where the call brings the keys.

        Raises:
            MetadataError: lengths are missing, inexact or contradict each other, or exceed the
                block table.
        """
        query_starts = _starts("query_start_loc_cpu", common.query_start_loc_cpu, common.num_reqs)
        key_starts: list[int] = []
        if attn_type in CACHE_FREE:
            key_starts = _key_starts(common, query_starts)
            key_lens = [stop - start for start, stop in pairwise(key_starts)]
        else:
            key_lens = _cached_lens(common, attn_type)
            _check_table(common.block_table, key_lens, block_size)
        is_decoder = attn_type is AttentionType.DECODER
        return cls(
            query_starts=query_starts,
            key_lens=key_lens,
            key_starts=key_starts,
            is_causal=_causal(common) if is_decoder else [False] * common.num_reqs,
            ranges=_ranges(common, attn_type),
        )

    @property
    def num_tokens(self) -> int:
        """Query rows that belong to requests."""
        return self.query_starts[-1]

    @property
    def num_keys(self) -> int:
        """Keys that the call brings."""
        return self.key_starts[-1] if self.key_starts else 0


def _starts(name: str, starts: Tensor, num_reqs: int) -> list[int]:
    numbers: list[int] = starts.tolist()
    rises = all(start <= stop for start, stop in pairwise(numbers))
    if len(numbers) != num_reqs + 1 or numbers[0] != 0 or not rises:
        raise MetadataError.for_argument(
            name, numbers, f"{num_reqs + 1} prefix sums from 0 that never fall"
        )
    return numbers


def _key_starts(common: CommonAttentionMetadata, query_starts: list[int]) -> list[int]:
    if common.key_start_loc_cpu is None:
        return query_starts
    return _starts("key_start_loc_cpu", common.key_start_loc_cpu, common.num_reqs)


def _cached_lens(common: CommonAttentionMetadata, attn_type: AttentionType) -> list[int]:
    if attn_type is not AttentionType.ENCODER_DECODER:
        name, lens = "seq_lens_cpu", common.exact_seq_lens_cpu
    elif common.encoder_seq_lens_cpu is not None:
        name, lens = "encoder_seq_lens_cpu", common.encoder_seq_lens_cpu
    else:
        raise MetadataError.for_argument(
            "encoder_seq_lens_cpu", None, "(num_reqs,) int32 on the host, for cross-attention"
        )
    numbers: list[int] = lens.tolist()
    if min(numbers, default=0) < 0:
        raise MetadataError.for_argument(name, numbers, "lengths >= 0")
    return numbers


def _check_table(
    block_table: Tensor | None, key_lens: Sequence[int], block_size: int | None
) -> None:
    if block_table is None or block_size is None:
        raise MetadataError.for_argument("block_table", None, "(num_reqs, M) int32")
    reach = block_table.shape[1] * block_size
    longest = max(key_lens, default=0)
    if longest > reach:
        raise MetadataError.for_argument(
            f"key length of request {list(key_lens).index(longest)}",
            longest,
            f"at most {reach}, what a row of block_table addresses",
        )


def _causal(common: CommonAttentionMetadata) -> list[bool]:
    if isinstance(common.causal, bool) or common.causal_cpu is None:
        return [bool(common.causal)] * common.num_reqs
    flags: list[bool] = common.causal_cpu.tolist()
    return flags


def _ranges(common: CommonAttentionMetadata, attn_type: AttentionType) -> Sequence[Sequence[Range]]:
    given = common.mm_prefix_ranges
    if not given:
        return ()
    if attn_type is not AttentionType.DECODER:
        raise MetadataError.for_argument(
            "mm_prefix_ranges", dict(given), f"none with attn_type={attn_type}"
        )
    unknown = [request for request in given if not 0 <= request < common.num_reqs]
    if unknown:
        raise MetadataError.for_argument(
            "mm_prefix_ranges", f"keyed by {unknown}", f"requests below {common.num_reqs}"
        )
    return [given.get(request, ()) for request in range(common.num_reqs)]
