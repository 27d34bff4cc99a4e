"""The reference over batches: one sequence, sequences in a row, sequences over a cache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from attn_shared._reference_cache import PLAIN_DTYPES, PagedCache
from attn_shared._reference_core import (
    Arithmetic,
    AttentionOptions,
    ReferenceResult,
    attend,
    bottom_right_positions,
    check_heads,
    largest_seen_value,
    visible_keys,
)
from attn_shared.errors import InvalidInputError

__all__ = ["PagedBatch", "dense", "paged", "ragged"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PagedBatch:
    """Which rows and how many keys belong to each request, and how they see each other.

    Attributes:
        query_start_loc: integers (B + 1,), from 0, never falling.
        seq_lens: integers (B,), keys of each request.
        causal: for all requests, or bool (B,).
        mm_prefix_ranges: request index to its inclusive ranges of absolute positions.
        fresh_key: (T, Hkv, D), or None: the step's own tokens, read instead of their stored form.
        fresh_value: (T, Hkv, Dv), or None.
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    causal: bool | Tensor = True
    mm_prefix_ranges: Mapping[int, Sequence[tuple[int, int]]] = field(default_factory=dict)
    fresh_key: Tensor | None = None
    fresh_value: Tensor | None = None

    def __post_init__(self) -> None:
        """Refuse sizes that contradict each other."""
        count = len(self.seq_lens)
        if len(self.query_start_loc) != count + 1:
            raise InvalidInputError.for_argument(
                "query_start_loc", f"of length {len(self.query_start_loc)}", f"length {count + 1}"
            )
        if isinstance(self.causal, Tensor) and (
            self.causal.shape != (count,) or self.causal.dtype != torch.bool
        ):
            raise InvalidInputError.for_argument(
                "causal",
                f"{self.causal.dtype} {tuple(self.causal.shape)}",
                f"bool or bool ({count},)",
            )
        unknown = [index for index in self.mm_prefix_ranges if not 0 <= index < count]
        if unknown:
            raise InvalidInputError.for_argument(
                "mm_prefix_ranges", f"keyed by {unknown}", f"request indices below {count}"
            )
        if (self.fresh_key is None) != (self.fresh_value is None):
            raise InvalidInputError.for_argument(
                "fresh_key, fresh_value", "one tensor and one None", "both or neither"
            )

    def requests(self, num_rows: int) -> Iterator[tuple[int, slice, int, bool]]:
        """Yield index, query rows, key length and causality of each request."""
        causal = self.causal
        flags = (
            causal.tolist() if isinstance(causal, Tensor) else [bool(causal)] * len(self.seq_lens)
        )
        rows = _row_slices("query_start_loc", self.query_start_loc, num_rows)
        for index, length in enumerate(self.seq_lens.tolist()):
            if length < 0:
                raise InvalidInputError.for_argument(f"seq_lens[{index}]", length, ">= 0")
            yield index, rows[index], length, flags[index]

    def overlay(self, key: Tensor, value: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """Replace the last keys and values of a request by its fresh ones."""
        if self.fresh_key is None or self.fresh_value is None or not len(key):
            return key, value
        count = rows.stop - rows.start
        if count > len(key):
            raise InvalidInputError.for_argument(
                "seq_lens", len(key), f">= {count}, the request's new tokens, with fresh_key"
            )
        old = len(key) - count
        fresh_key, fresh_value = self.fresh_key[rows].to(key), self.fresh_value[rows].to(value)
        return torch.cat([key[:old], fresh_key]), torch.cat([value[:old], fresh_value])


class _Rows:
    """Collects the results of requests into (T, Hq, Dv) and (Hq, T), NaN where none wrote."""

    def __init__(self, query: Tensor, head_size_v: int, arithmetic: Arithmetic) -> None:
        tokens, heads = query.shape[:2]
        nan = float("nan")
        self.arithmetic = arithmetic
        self.output = query.new_full((tokens, heads, head_size_v), nan, dtype=arithmetic.output)
        self.lse = query.new_full((heads, tokens), nan, dtype=arithmetic.accumulate)
        self.num_tokens = 0
        self.value_abs_max = 0.0

    def add(
        self,
        rows: slice,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        options: AttentionOptions,
        positions: Tensor,
        visible: Tensor,
    ) -> None:
        """Attend for the rows of one request."""
        self.output[rows], self.lse[:, rows] = attend(
            query[rows],
            key,
            value,
            options,
            visible=visible,
            query_positions=positions,
            arithmetic=self.arithmetic,
        )
        self.num_tokens = max(self.num_tokens, rows.stop)
        self.value_abs_max = max(self.value_abs_max, largest_seen_value(value, visible))

    def result(self) -> ReferenceResult:
        """Return what was collected."""
        return ReferenceResult(
            output=self.output,
            lse=self.lse,
            num_tokens=self.num_tokens,
            value_abs_max=self.value_abs_max,
        )


def dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: AttentionOptions,
    *,
    causal: bool,
    query_positions: Tensor | None,
    mm_prefix_ranges: Sequence[tuple[int, int]],
    arithmetic: Arithmetic,
) -> ReferenceResult:
    """One sequence; see `attn_shared.reference.attention`."""
    _check_token_major(query=query, key=key, value=value)
    check_heads(query, key, value, options)
    if query_positions is None:
        query_positions = bottom_right_positions(len(query), len(key), query.device)
    elif query_positions.shape != query.shape[:1]:
        raise InvalidInputError.for_argument(
            "query_positions.shape", tuple(query_positions.shape), f"({len(query)},)"
        )
    visible = visible_keys(
        query_positions, len(key), options, causal=causal, mm_prefix_ranges=mm_prefix_ranges
    )
    rows = _Rows(query, value.shape[-1], arithmetic)
    everything = slice(0, len(query))
    rows.add(everything, query, key, value, options, query_positions, visible)
    return rows.result()


def ragged(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: AttentionOptions,
    *,
    query_start_loc: Tensor,
    key_start_loc: Tensor,
    causal: bool,
    arithmetic: Arithmetic,
) -> ReferenceResult:
    """Sequences one after another without a cache; see `attn_shared.reference`."""
    _check_token_major(query=query, key=key, value=value)
    check_heads(query, key, value, options)
    if len(key_start_loc) != len(query_start_loc):
        raise InvalidInputError.for_argument(
            "key_start_loc", f"of length {len(key_start_loc)}", f"length {len(query_start_loc)}"
        )
    query_rows = _row_slices("query_start_loc", query_start_loc, len(query))
    key_rows = _row_slices("key_start_loc", key_start_loc, len(key))
    rows = _Rows(query, value.shape[-1], arithmetic)
    for own, seen in zip(query_rows, key_rows, strict=True):
        length = seen.stop - seen.start
        positions = bottom_right_positions(own.stop - own.start, length, query.device)
        visible = visible_keys(positions, length, options, causal=causal)
        rows.add(own, query, key[seen], value[seen], options, positions, visible)
    return rows.result()


def paged(
    query: Tensor,
    cache: PagedCache,
    options: AttentionOptions,
    batch: PagedBatch,
    arithmetic: Arithmetic,
) -> ReferenceResult:
    """Sequences over a paged cache; see `attn_shared.reference.paged_attention`."""
    _check_paged(query, cache, options, batch)
    rows = _Rows(query, cache.value_cache.shape[-1], arithmetic)
    for index, own, length, causal in batch.requests(len(query)):
        key, value = cache.read(index, length, arithmetic.accumulate)
        key, value = batch.overlay(key, value, own)
        positions = bottom_right_positions(own.stop - own.start, length, query.device)
        ranges = batch.mm_prefix_ranges.get(index, ())
        visible = visible_keys(positions, length, options, causal=causal, mm_prefix_ranges=ranges)
        rows.add(own, query, key, value, options, positions, visible)
    return rows.result()


def _check_paged(
    query: Tensor, cache: PagedCache, options: AttentionOptions, batch: PagedBatch
) -> None:
    _check_token_major(query=query)
    check_heads(query, cache.key_cache, cache.value_cache, options)
    table = cache.block_table
    if table.dim() != 2 or len(table) < len(batch.seq_lens):
        raise InvalidInputError.for_argument(
            "block_table.shape", tuple(table.shape), f"({len(batch.seq_lens)} or more rows, M)"
        )
    if batch.fresh_key is not None and batch.fresh_value is not None:
        _check_token_major(fresh_key=batch.fresh_key, fresh_value=batch.fresh_value)
        wanted = [(len(query), *each.shape[2:]) for each in (cache.key_cache, cache.value_cache)]
        shapes = [tuple(batch.fresh_key.shape), tuple(batch.fresh_value.shape)]
        if shapes != wanted:
            raise InvalidInputError.for_argument(
                "fresh_key.shape, fresh_value.shape", shapes, f"{wanted}"
            )


def _check_token_major(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.dim() != 3 or tensor.dtype not in PLAIN_DTYPES:
            allowed = "a floating tensor of 16, 32 or 64 bits, (tokens, heads, head_size)"
            raise InvalidInputError.for_argument(
                name, f"{tensor.dtype} {tuple(tensor.shape)}", allowed
            )


def _row_slices(name: str, start_loc: Tensor, num_rows: int) -> list[slice]:
    """Return the rows of each request, after checking that they tile 0..start_loc[-1]."""
    starts = start_loc.tolist()
    pairs = list(pairwise(starts))
    rises = all(start <= stop for start, stop in pairs)
    if not starts or starts[0] != 0 or not rises or starts[-1] > num_rows:
        allowed = f"offsets from 0 that never fall, to at most {num_rows}"
        raise InvalidInputError.for_argument(name, starts, allowed)
    return [slice(start, stop) for start, stop in pairs]
