"""The sampling rule in float64, row by row: slow, obvious, and what every sampler is held to.

The rule: temperature first, then top-k, then top-p over what top-k left, then min-p.

- Greedy: temperature 0 or top-p 0 keeps one token, the first of the largest logits.
- top-k keeps a token if fewer than k tokens have a larger logit. Ties at the cut are kept.
  0, -1 and None are off, and k beyond the vocabulary is the vocabulary.
- top-p keeps a token if the tokens with a larger logit hold less than p of what top-k left,
  renormalised. Ties at the cut are kept, the most likely token always. 1 and None are off.
- min-p keeps a token that is at least min_p times as likely as the most likely one.
- A row with a NaN, or whose largest logit is infinite, has no distribution: it is not valid, and
  its id is 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["ExactRow", "exact_row"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactRow:
    """The distribution that a token of one row is drawn from.

    Attributes:
        valid: whether the row has a distribution.
        kept: per token, whether the filters kept it; nothing where the row is not valid.
        probabilities: per token; they sum to 1, and are all 0 where the row is not valid.
        margin: how far the closest cut of top-p and min-p was from falling otherwise, as a part
            of the probability; infinite where neither is on. Arithmetic in float32 may decide
            otherwise where this is below its error.
    """

    valid: bool
    kept: tuple[bool, ...]
    probabilities: tuple[float, ...]
    margin: float = math.inf


def exact_row(
    logits: Sequence[float],
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
) -> ExactRow:
    """Return what one row's token is drawn from, by the rule of this module.

    Args:
        logits: one per token; -inf for a token that must not be drawn.
        temperature: at least 0.
        top_k: how many of the most likely tokens stay.
        top_p: which part of the probability stays.
        min_p: how likely a token must be, as a part of the most likely one's probability.
    """
    size, largest = len(logits), max(logits, default=-math.inf)
    if any(map(math.isnan, logits)) or math.isinf(largest):
        return ExactRow(valid=False, kept=(False,) * size, probabilities=(0.0,) * size)
    if temperature == 0 or (top_p is not None and top_p <= 0):
        first = logits.index(largest)
        kept = [token == first for token in range(size)]
        return ExactRow(valid=True, kept=tuple(kept), probabilities=tuple(map(float, kept)))
    kept = _top_k(logits, top_k)
    weights = [math.exp((logit - largest) / temperature) for logit in logits]
    kept, margin_p = _top_p(logits, weights, kept, top_p)
    kept, margin_min = _min_p(weights, kept, min_p)
    total = math.fsum(weight for weight, is_kept in zip(weights, kept, strict=True) if is_kept)
    pairs = zip(weights, kept, strict=True)
    return ExactRow(
        valid=True,
        kept=tuple(kept),
        probabilities=tuple(weight / total if is_kept else 0.0 for weight, is_kept in pairs),
        margin=min(margin_p, margin_min),
    )


def _top_k(logits: Sequence[float], top_k: int | None) -> list[bool]:
    possible = [logit > -math.inf for logit in logits]
    if top_k is None or top_k <= 0 or top_k >= len(logits):
        return possible
    cut = sorted(logits, reverse=True)[top_k - 1]  # k - 1 tokens at most have a larger logit
    return [
        is_possible and logit >= cut for logit, is_possible in zip(logits, possible, strict=True)
    ]


def _top_p(
    logits: Sequence[float], weights: Sequence[float], kept: list[bool], top_p: float | None
) -> tuple[list[bool], float]:
    if top_p is None or top_p >= 1:
        return kept, math.inf
    tied: dict[float, list[float]] = {}
    for logit, weight, is_kept in zip(logits, weights, kept, strict=True):
        if is_kept:
            tied.setdefault(logit, []).append(weight)
    total = math.fsum(weight for group in tied.values() for weight in group)
    allowed: set[float] = set()
    margin, larger = math.inf, 0.0
    for logit in sorted(tied, reverse=True):
        if larger < top_p * total:
            allowed.add(logit)
        margin = min(margin, abs(larger / total - top_p))
        larger += math.fsum(tied[logit])
    pairs = zip(logits, kept, strict=True)
    return [is_kept and logit in allowed for logit, is_kept in pairs], margin


def _min_p(
    weights: Sequence[float], kept: list[bool], min_p: float | None
) -> tuple[list[bool], float]:
    if min_p is None or min_p <= 0:
        return kept, math.inf
    pairs = list(zip(weights, kept, strict=True))
    distances = (abs(weight - min_p) for weight, is_kept in pairs if is_kept and weight < 1)
    margin = min(distances, default=math.inf)
    return [is_kept and weight >= min_p for weight, is_kept in pairs], margin
