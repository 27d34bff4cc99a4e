"""The order of a batch: which rows are decodes, where prefills begin, and how to bring them there.

Four kinds of rows, in the order in which a batch should have them: decode, short extend, long
extend, prefill. `reorder` says how to reach that order; the engine does it, before the batch is
described. `split_decodes_and_prefills` and `split_decodes_extends_and_prefills` find the bounds in
a batch so ordered. All of it works on host lengths and returns plain ints.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from typing import NamedTuple, TypeVar

import torch

from attn_shared._integer_checks import host_lens
from attn_shared.argument_checks import require_count, require_kind
from attn_shared.errors import InvalidInputError, MetadataError
from attn_shared.metadata import CommonAttentionMetadata

__all__ = [
    "BatchSplit",
    "Region",
    "Reordering",
    "ThreeWaySplit",
    "check_decodes_first",
    "region_of",
    "reorder",
    "split_decodes_and_prefills",
    "split_decodes_extends_and_prefills",
]

R = TypeVar("R")


class BatchSplit(NamedTuple):
    """How many leading rows and tokens are decodes; the rest are prefills."""

    num_decodes: int
    num_prefills: int
    num_decode_tokens: int
    num_prefill_tokens: int


class ThreeWaySplit(NamedTuple):
    """Rows and tokens of the three parts of a batch, in this order."""

    num_decodes: int
    num_extends: int
    num_prefills: int
    num_decode_tokens: int
    num_extend_tokens: int
    num_prefill_tokens: int


def split_decodes_and_prefills(
    common: CommonAttentionMetadata,
    *,
    decode_threshold: int = 1,
    require_uniform: bool = False,
    treat_short_extends_as_decodes: bool = True,
) -> BatchSplit:
    """Find where the decodes of an ordered batch end.

    A row is a decode if it has at most `decode_threshold` query tokens and is not prefilling, or
    short extends count as decodes. Decodes are the rows before the first that is none; whatever
    follows it is left to the prefill path, which serves rows of every length.

    Args:
        common: the batch; needs `is_prefilling` where short extends are not decodes.
        decode_threshold: most query tokens of a decode.
        require_uniform: a decode must also be as long as the first row, or of length 0 (padding).
        treat_short_extends_as_decodes: rows that still read their prompt count by length alone.

    Raises:
        MetadataError: `is_prefilling` is needed and missing.
        InvalidInputError: the threshold is negative.
    """
    is_decode = _decode_rows(common, decode_threshold, treat_short_extends_as_decodes)
    if require_uniform:
        lens = common.query_lens_cpu
        is_decode = is_decode & ((lens == lens[:1]) | (lens == 0))
    num_decodes = _num_leading(is_decode)
    decode_tokens, prefill_tokens = _tokens_between(common, num_decodes)
    return BatchSplit(num_decodes, common.num_reqs - num_decodes, decode_tokens, prefill_tokens)


def split_decodes_extends_and_prefills(
    common: CommonAttentionMetadata,
    *,
    decode_threshold: int = 1,
    treat_short_extends_as_decodes: bool = True,
) -> ThreeWaySplit:
    """Find where decodes end and where rows without earlier keys (prefills) begin.

    A row that is no decode is a prefill if all its keys are new (seq_len == query_len), else an
    extend, which also reads keys of earlier steps. Padding (query length 0) goes with what
    precedes it.

    Args:
        common: the batch; needs `seq_lens_cpu`, of which an upper bound is enough: a prefill whose
            bound is too high counts as an extend, which reads the same keys.
        decode_threshold: most query tokens of a decode.
        treat_short_extends_as_decodes: as in `split_decodes_and_prefills`.

    Raises:
        MetadataError: host lengths or `is_prefilling` are needed and missing, or an extend follows
            a prefill, where its earlier keys would not be read.
        InvalidInputError: the threshold is negative.
    """
    require_kind("common", common, CommonAttentionMetadata)
    if common.seq_lens_cpu is None:
        raise MetadataError.for_argument(
            "seq_lens_cpu", None, "host lengths, exact or an upper bound"
        )
    lens = common.query_lens_cpu
    is_decode = _decode_rows(common, decode_threshold, treat_short_extends_as_decodes)
    is_prefill = ~is_decode & (common.seq_lens_cpu == lens) & (lens > 0)
    num_decodes = _num_leading(is_decode)
    first_prefill = max(num_decodes, _num_leading(~is_prefill))
    late_extend = (common.seq_lens_cpu > lens) & (lens > 0)
    late_extend[:first_prefill] = False
    _refuse_misplaced(common, late_extend, f"no row with earlier keys after row {first_prefill}")
    return ThreeWaySplit(
        num_decodes,
        first_prefill - num_decodes,
        common.num_reqs - first_prefill,
        *_tokens_between(common, num_decodes, first_prefill),
    )


def check_decodes_first(common: CommonAttentionMetadata, *, decode_threshold: int = 1) -> None:
    """Refuse a batch in which a decode follows a longer row: nobody ran `reorder`.

    For builders that lose their decode path on such a batch. Padding (query length 0) may stand
    anywhere, and a prompt's short rest may follow a longer row.

    Raises:
        MetadataError: names the first decode out of place.
        InvalidInputError: the threshold is negative.
    """
    lens = common.query_lens_cpu
    is_short = _decode_rows(common, decode_threshold, short_extends=True)
    is_late = is_short & (lens > 0)
    is_late[: _num_leading(is_short)] = False
    if common.is_prefilling is not None:
        is_late &= ~common.is_prefilling
    _refuse_misplaced(common, is_late, f"decodes (up to {decode_threshold} tokens) before all else")


def _decode_rows(
    common: CommonAttentionMetadata, decode_threshold: int, short_extends: bool
) -> torch.Tensor:
    """Return (B,) bool: the row is a decode."""
    require_kind("common", common, CommonAttentionMetadata)
    require_count("decode_threshold", decode_threshold, least=0)
    is_short = common.query_lens_cpu <= decode_threshold
    if short_extends:
        return is_short
    if common.is_prefilling is None:
        raise MetadataError.for_argument(
            "is_prefilling",
            None,
            "(num_reqs,) bool on the host, where short extends are not decodes",
        )
    return is_short & ~common.is_prefilling


def _num_leading(rows: torch.Tensor) -> int:
    """Return how many leading entries are True."""
    return int(rows.long().cumprod(0).sum())


def _tokens_between(common: CommonAttentionMetadata, *bounds: int) -> list[int]:
    """Return the query tokens of each part between the row bounds."""
    marks = [0, *(int(common.query_start_loc_cpu[bound]) for bound in bounds)]
    marks.append(int(common.query_start_loc_cpu[-1]))
    return [stop - start for start, stop in pairwise(marks)]


def _refuse_misplaced(
    common: CommonAttentionMetadata, misplaced: torch.Tensor, allowed: str
) -> None:
    if not bool(misplaced.any()):
        return
    row = int(misplaced.int().argmax())
    raise MetadataError.for_argument(
        f"query_start_loc row {row}",
        f"of {int(common.query_lens_cpu[row])} query tokens, out of order",
        allowed,
        hint="the engine reorders a batch (attn_shared.batching.reorder) before it is described.",
    )


class Region(IntEnum):
    """Where a row belongs in an ordered batch."""

    DECODE = 0
    """Its prompt is complete, and it brings no more tokens than the threshold."""
    SHORT_EXTEND = 1
    """It has earlier keys and still reads its prompt, at most the threshold's tokens at a time."""
    LONG_EXTEND = 2
    """It has earlier keys and brings more tokens than the threshold."""
    PREFILL = 3
    """It has no earlier keys, however short it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reordering:
    """How to bring the rows of a batch in order.

    Attributes:
        order: which old row stands at each place afterwards.
        swaps: pairs of places to swap, one after another, which lead there; for an engine that
            keeps its rows in place.
    """

    order: tuple[int, ...]
    swaps: tuple[tuple[int, int], ...]

    @property
    def changed(self) -> bool:
        """Whether any row moves."""
        return bool(self.swaps)

    def apply(self, rows: Sequence[R]) -> list[R]:
        """Return what belongs to the rows in their new order."""
        return [rows[row] for row in self.order]


def region_of(
    num_scheduled: int, num_computed: int, num_prompt: int, decode_threshold: int
) -> Region:
    """Return where a row belongs.

    Args:
        num_scheduled: its query tokens of this step.
        num_computed: its keys of earlier steps.
        num_prompt: tokens of its prompt.
        decode_threshold: most query tokens of a decode.
    """
    if num_computed == 0:
        return Region.PREFILL
    if num_scheduled > decode_threshold:
        return Region.LONG_EXTEND
    return Region.DECODE if num_computed >= num_prompt else Region.SHORT_EXTEND


def reorder(
    num_scheduled: Sequence[int],
    num_computed: Sequence[int],
    num_prompt: Sequence[int],
    decode_threshold: int,
) -> Reordering:
    """Return how to order a batch by region.

    Only rows that stand in another region's place move; among them, those of one region keep
    their order. `decode_threshold` is the least that any builder of the step asks for.

    Args:
        num_scheduled: (B,) query tokens of this step.
        num_computed: (B,) keys of earlier steps.
        num_prompt: (B,) tokens of the prompt.
        decode_threshold: most query tokens of a decode.

    Raises:
        InvalidInputError: the lists differ in length, or are none of ints, or the threshold is no
            count.
    """
    require_count("decode_threshold", decode_threshold, least=0)
    num_scheduled = host_lens("num_scheduled", num_scheduled)
    num_computed = host_lens("num_computed", num_computed)
    num_prompt = host_lens("num_prompt", num_prompt)
    lengths = (len(num_scheduled), len(num_computed), len(num_prompt))
    if len(set(lengths)) != 1:
        raise InvalidInputError.for_argument(
            "num_scheduled, num_computed, num_prompt", f"of lengths {lengths}", "one length"
        )
    rows = zip(num_scheduled, num_computed, num_prompt, strict=True)
    regions = [region_of(*row, decode_threshold) for row in rows]
    due = sorted(regions)
    moving = [row for row, region in enumerate(regions) if region != due[row]]
    place_of = dict(zip(sorted(moving, key=regions.__getitem__), moving, strict=True))
    order = list(range(len(regions)))
    for row, place in place_of.items():
        order[place] = row
    return Reordering(order=tuple(order), swaps=tuple(_swaps_along(place_of)))


def _swaps_along(place_of: dict[int, int]) -> list[tuple[int, int]]:
    """Return the swaps that send each row to its place: each cycle unrolled from its first row."""
    swaps = []
    done = set()
    for first in place_of:
        place = place_of[first]
        while first not in done and place != first:
            swaps.append((first, place))
            done.add(place)
            place = place_of[place]
    return swaps
