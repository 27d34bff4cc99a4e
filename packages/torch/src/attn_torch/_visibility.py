"""Which keys a query position sees, on the host as bounds and on the device as a mask.

Positions are absolute. For one query the keys that causality, window and chunk leave visible are
one interval, whose two ends never fall from one position to the next; the extent of a run of rows
and whether all of them see all of it follow from its first and last row alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from attn_shared.errors import MetadataError
from attn_shared.request import Window

__all__ = ["Range", "Visibility", "overlapping"]

Range = tuple[int, int]
"""(start, end), both inclusive: positions that see each other in both directions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Visibility:
    """What a layer lets a query see, causality aside.

    Attributes:
        window: (left, right) keys beside the query's own; None is unbounded.
        chunk_size: keys of the query's own chunk only; None is off.
    """

    window: Window = (None, None)
    chunk_size: int | None = None

    def first_key(self, position: int) -> int:
        """Return the leftmost key that a query at `position` sees."""
        first, (left, _) = 0, self.window
        if left is not None:
            first = max(first, position - left)
        if self.chunk_size is not None:
            first = max(first, position // self.chunk_size * self.chunk_size)
        return first

    def last_key(self, position: int, key_len: int, *, is_causal: bool) -> int:
        """Return the rightmost of `key_len` keys that a query at `position` sees; < 0 for none."""
        last, (_, right) = key_len - 1, self.window
        if is_causal:
            last = min(last, position)
        if right is not None:
            last = min(last, position + right)
        return last

    def num_blind_rows(
        self, position: int, query_len: int, key_len: int, *, is_causal: bool
    ) -> int:
        """Return how many leading rows see nothing, the first being at `position`.

        Positions rise to key_len - 1 at most, so that a row is blind only where its last key would
        be left of the first one.
        """
        if key_len == 0:
            return query_len
        reach = 0 if is_causal else self.window[1]
        return 0 if reach is None else min(query_len, max(0, -position - reach))

    def mask(
        self,
        query_positions: Tensor,
        key_positions: Tensor,
        *,
        is_causal: bool,
        ranges: Sequence[Range] = (),
    ) -> Tensor:
        """Return bool of the broadcast shape: whether the query sees the key.

        Keys are at positions >= 0; that they exist is not looked at. Chunks imply causality.

        Args:
            query_positions: integers (..., n, 1).
            key_positions: integers (..., 1, L).
            is_causal: whether keys to the right are hidden.
            ranges: multimodal ranges, which widen what the rest leaves visible.
        """
        left, right = self.window
        visible = key_positions <= query_positions if is_causal else key_positions >= 0
        if left is not None:
            visible = visible & (key_positions >= query_positions - left)
        if right is not None and not is_causal:
            visible = visible & (key_positions <= query_positions + right)
        if self.chunk_size is not None:
            chunk = query_positions.div(self.chunk_size, rounding_mode="floor")
            visible = visible & (key_positions >= chunk * self.chunk_size)
        for start, end in ranges:
            rows = (query_positions >= start) & (query_positions <= end)
            visible = visible | (rows & (key_positions >= start) & (key_positions <= end))
        return visible.expand(*visible.shape[:-2], query_positions.shape[-2], visible.shape[-1])


def overlapping(ranges: Sequence[Range], first: int, last: int) -> tuple[Range, ...]:
    """Return the ranges that hold a position of [first, last].

    Raises:
        MetadataError: a range is not 0 <= start <= end.
    """
    for start, end in ranges:
        if not 0 <= start <= end:
            raise MetadataError.for_argument(
                "mm_prefix_ranges", (start, end), "(start, end), inclusive, 0 <= start <= end"
            )
    return tuple((start, end) for start, end in ranges if start <= last and end >= first)
