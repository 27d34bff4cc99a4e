"""Requests of a batch as host integers, and how the rows of one are cut into calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import pairwise

from attn_torch._visibility import Range, Visibility, overlapping

__all__ = ["LOGITS_BYTES", "Chunk", "Cover", "Span", "row_chunks", "spans_of"]

LOGITS_BYTES = 256 * 2**20
"""Most bytes of logits, or of a mask in float32, that exist at once."""

MAX_MASKED = LOGITS_BYTES // 4
"""Most elements of a mask: a kernel may widen it to float32."""

MASKED_ROWS = 512
"""Most rows of a call that needs a mask. Half of a causal chunk's last `MASKED_ROWS` keys are
computed for nothing, so fewer rows waste less; below some hundreds the calls cost more."""


class Cover(Enum):
    """What the rows of a chunk see of its keys."""

    FULL = auto()
    """Every row sees every key: no mask."""
    SQUARE = auto()
    """As many keys as rows, row r sees keys 0 to r: torch's is_causal, which aligns top-left."""
    MASKED = auto()
    """Anything else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """The rows of one request that see at least one key.

    Attributes:
        request: its row in the block table.
        query_start: its first row of query.
        query_len: its rows.
        position: absolute position of the first row.
        key_len: its keys.
        key_start: its first key of a call that brings its keys; 0 with a cache.
        is_causal: whether keys to the right are hidden.
        ranges: multimodal ranges that hold one of the rows.
    """

    request: int
    query_start: int
    query_len: int
    position: int
    key_len: int
    key_start: int = 0
    is_causal: bool = True
    ranges: tuple[Range, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Some rows of a span, and the keys that any of them sees.

    Attributes:
        first_row: relative to the span.
        num_rows: how many.
        first_key: absolute position of the leftmost key.
        num_keys: how many.
        cover: which of the keys each row sees.
    """

    first_row: int
    num_rows: int
    first_key: int
    num_keys: int
    cover: Cover

    @property
    def stop_row(self) -> int:
        """The row after the last."""
        return self.first_row + self.num_rows

    @property
    def stop_key(self) -> int:
        """The position after the last key."""
        return self.first_key + self.num_keys


def spans_of(
    query_starts: Sequence[int],
    key_lens: Sequence[int],
    *,
    is_causal: Sequence[bool],
    visibility: Visibility,
    ranges: Sequence[Sequence[Range]] = (),
    key_starts: Sequence[int] = (),
) -> tuple[list[Span], list[slice]]:
    """Return the requests' rows that see a key, and slices of the rows that see none.

    Args:
        query_starts: (B + 1,) prefix sums of query lengths.
        key_lens: (B,) keys.
        is_causal: (B,).
        visibility: of the layers.
        ranges: (B,) multimodal ranges, or empty.
        key_starts: (B + 1,) prefix sums of key lengths where the call brings the keys, or empty.
    """
    spans, blind = [], []
    for request, (start, stop) in enumerate(pairwise(query_starts)):
        key_len, causal = key_lens[request], is_causal[request]
        first = key_len - (stop - start)
        hidden = visibility.num_blind_rows(first, stop - start, key_len, is_causal=causal)
        if hidden:
            blind.append(slice(start, start + hidden))
        if start + hidden == stop:
            continue
        position = first + hidden
        span = Span(
            request=request,
            query_start=start + hidden,
            query_len=stop - start - hidden,
            position=position,
            key_len=key_len,
            key_start=key_starts[request] if key_starts else 0,
            is_causal=causal,
            ranges=overlapping(ranges[request], position, key_len - 1) if ranges else (),
        )
        spans.append(span)
    return spans, _joined(blind)


def _joined(slices: Sequence[slice]) -> list[slice]:
    """Return the slices with neighbours made one: padded requests are many, and side by side."""
    joined: list[slice] = []
    for piece in slices:
        if joined and joined[-1].stop == piece.start:
            joined[-1] = slice(joined[-1].start, piece.stop)
        else:
            joined.append(piece)
    return joined


def row_chunks(
    span: Span,
    visibility: Visibility,
    *,
    masked_rows: int = MASKED_ROWS,
    max_masked: int = MAX_MASKED,
    max_logits: int | None = None,
) -> tuple[Chunk, ...]:
    """Cut a span's rows into chunks, each with only the keys that its rows see.

    Args:
        span: of one request.
        visibility: of the layer.
        masked_rows: most rows of a chunk that needs a mask; cutting saves the keys that lie right
            of a causal chunk and left of its window.
        max_masked: most rows * keys of a chunk that needs a mask, a single row excepted.
        max_logits: the same for any chunk; None: no bound.
    """
    whole = _chunk(span, visibility, 0, span.query_len)
    size = whole.num_rows * whole.num_keys
    is_masked = whole.cover is Cover.MASKED
    fits = max_logits is None or size <= max_logits
    if fits and not (is_masked and (whole.num_rows > masked_rows or size > max_masked)):
        return (whole,)
    limit = whole.num_rows
    if whole.cover is not Cover.FULL:
        limit = min(masked_rows, max_masked // whole.num_keys)
    if max_logits is not None:
        limit = min(limit, max_logits // whole.num_keys)
    return tuple(_chunks_of(span, visibility, max(1, limit)))


def _chunks_of(span: Span, visibility: Visibility, limit: int) -> Iterator[Chunk]:
    for first in range(0, span.query_len, limit):
        yield _chunk(span, visibility, first, min(first + limit, span.query_len))


def _chunk(span: Span, visibility: Visibility, first_row: int, stop_row: int) -> Chunk:
    top, bottom = span.position + first_row, span.position + stop_row - 1
    first = visibility.first_key(top)
    last = visibility.last_key(bottom, span.key_len, is_causal=span.is_causal)
    cover = Cover.MASKED
    if overlapping(span.ranges, top, bottom):
        first, last = _widened(span, first, last, top, bottom)
    elif visibility.first_key(bottom) == first:
        if visibility.last_key(top, span.key_len, is_causal=span.is_causal) == last:
            cover = Cover.FULL
        elif span.is_causal and first == top:
            cover = Cover.SQUARE
    return Chunk(
        first_row=first_row,
        num_rows=stop_row - first_row,
        first_key=first,
        num_keys=last - first + 1,
        cover=cover,
    )


def _widened(span: Span, first: int, last: int, top: int, bottom: int) -> tuple[int, int]:
    """Return the extent with the ranges that a row of [top, bottom] lies in."""
    for start, end in overlapping(span.ranges, top, bottom):
        first, last = min(first, start), max(last, min(end, span.key_len - 1))
    return first, last
