"""Medians with a bootstrap interval, and ratios of what was measured side by side."""

from __future__ import annotations

import random
from collections.abc import Sequence
from statistics import median

__all__ = ["interval", "median", "ratios"]

_RESAMPLES = 1000
_TAIL = 0.025  # on each side: a 95% interval


def interval(values: Sequence[float], *, seed: int = 0) -> tuple[float, float]:
    """Return the 95% percentile bootstrap interval of the median (Efron, 1979).

    Args:
        values: measurements; one alone is its own interval.
        seed: of the resampling: the same values always give the same interval.
    """
    generator = random.Random(seed)
    medians = sorted(median(generator.choices(values, k=len(values))) for _ in range(_RESAMPLES))
    beyond = int(_TAIL * _RESAMPLES)
    return medians[beyond], medians[-1 - beyond]


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Return each round's own ratio: what slowed one round slowed both of its sides."""
    return [a / b for a, b in zip(ours, theirs, strict=True)]
