"""Medians with a bootstrap interval, and ratios of what was measured side by side."""

from __future__ import annotations

import random
from collections.abc import Sequence
from statistics import median

__all__ = ["interval", "median", "paired_ratio"]

_RESAMPLES = 1000
_TAIL = 0.025  # on each side: a 95% interval


def interval(values: Sequence[float], *, seed: int = 0) -> tuple[float, float]:
    """Return the 95% percentile bootstrap interval of the median (Efron, 1979).

    Args:
        values: measurements; one alone is its own interval.
        seed: of the resampling.
    """
    generator = random.Random(seed)
    medians = sorted(median(generator.choices(values, k=len(values))) for _ in range(_RESAMPLES))
    low = medians[int(_TAIL * _RESAMPLES)]
    high = medians[int((1 - _TAIL) * _RESAMPLES) - 1]
    return low, high


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the median of the rounds' own ratios: what slowed one round slowed both sides."""
    return median(a / b for a, b in zip(ours, theirs, strict=True))
