"""Masks and score functions of flex_attention, written on absolute positions.

flex_attention hands a function the indices (batch, head, query, key) of one score. Here a batch
entry is a tile, which is some rows of one request; a query index counts rows times the query heads
of one kv head; what a key index means depends on where the keys lie, so that it is translated by
the plan (`KeyPosition`). Everything below works on scalars as flex_attention traces them, and on
tensors that broadcast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_torch._visibility import Visibility

__all__ = ["KeyPosition", "Logits", "MaskMod", "ScoreMod", "TileFacts", "mask_mod", "see"]

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(tile, head, query index, key index) -> whether the pair is visible."""

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""(score, tile, head, query index, key index) -> the score that enters the softmax."""

KeyPosition = Callable[[Tensor, Tensor], Tensor]
"""(tile, key index) -> absolute position."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TileFacts:
    """What a mask has to know of each of n tiles.

    Attributes:
        first_position: (n,) int32: absolute position of the first row; may be negative.
        key_len: (n,) int32: keys of the request.
        causal: whether keys to the right are hidden; (n,) bool where tiles differ.
        ranges: (n, R, 2) int32: inclusive ranges that see each other; (1, 0) is an empty one. None
            where no tile has any.
    """

    first_position: Tensor
    key_len: Tensor
    causal: bool | Tensor
    ranges: Tensor | None

    @property
    def num_ranges(self) -> int:
        """Ranges per tile, empty ones included."""
        return 0 if self.ranges is None else self.ranges.shape[1]


def see(
    query: Tensor,
    key: Tensor,
    visibility: Visibility,
    *,
    key_len: Tensor,
    causal: bool | Tensor,
    ranges: Iterable[tuple[Tensor, Tensor]] = (),
) -> Tensor:
    """Return whether the query at one position sees the key at another.

    Causality, window and chunk narrow; ranges widen, and never past the keys that exist.

    Args:
        query: absolute positions of queries.
        key: absolute positions of keys, >= 0.
        visibility: window and chunk.
        key_len: how many keys exist.
        causal: whether keys to the right are hidden.
        ranges: (start, end), both inclusive.
    """
    left, right = visibility.window
    visible = key >= 0
    if isinstance(causal, Tensor):
        bounded = key <= query
        free = visible if right is None else key <= query + right
        visible = (causal & bounded) | (~causal & free)
    elif causal:
        visible = key <= query
    elif right is not None:
        visible = key <= query + right
    if left is not None:
        visible = visible & (key >= query - left)
    if visibility.chunk_size is not None:
        visible = visible & (key // visibility.chunk_size == query // visibility.chunk_size)
    for start, end in ranges:
        both = (query >= start) & (query <= end) & (key >= start) & (key <= end)
        visible = visible | both
    return visible & (key < key_len)


def mask_mod(
    tiles: TileFacts, visibility: Visibility, group: int, key_position: KeyPosition
) -> MaskMod:
    """Return the mask of a plan; `group` is the number of query heads per kv head."""
    first_position, key_len, causal = tiles.first_position, tiles.key_len, tiles.causal
    ranges, num_ranges = tiles.ranges, tiles.num_ranges

    def is_visible(tile: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        pairs = []
        if ranges is not None:
            pairs = [(ranges[tile, i, 0], ranges[tile, i, 1]) for i in range(num_ranges)]
        return see(
            first_position[tile] + query // group,
            key_position(tile, key),
            visibility,
            key_len=key_len[tile],
            causal=causal[tile] if isinstance(causal, Tensor) else causal,
            ranges=pairs,
        )

    return is_visible


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Logits:
    """What a layer makes of products: scale, then the cap, then the ALiBi bias.

    Attributes:
        scale: factor on q.k.
        softcap: cap of `cap * tanh(x / cap)`, or None.
        slopes: (Hq,) float32 of the bias -slope * |i - j|, or None.
    """

    scale: float
    softcap: float | None
    slopes: Tensor | None

    def score_mod(
        self, first_position: Tensor, group: int, key_position: KeyPosition
    ) -> ScoreMod | None:
        """Return what turns scaled products into logits; None where they stay as they are.

        Args:
            first_position: (n,) of the tiles.
            group: query heads per kv head.
            key_position: of the plan.
        """
        softcap, slopes = self.softcap, self.slopes
        if softcap is None and slopes is None:
            return None

        def logit(score: Tensor, tile: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            if softcap is not None:
                score = softcap * torch.tanh(score / softcap)
            if slopes is not None:
                distance = first_position[tile] + query // group - key_position(tile, key)
                score = score - slopes[head * group + query % group] * torch.abs(distance)
            return score

        return logit
