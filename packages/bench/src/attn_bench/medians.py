"""Medians with a bootstrap interval, and ratios of what was measured side by side."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import torch

__all__ = ["interval", "median", "ratios"]

_RESAMPLES = 1000
_TAIL = 0.025  # on each side: a 95% interval


def interval(values: Sequence[float], *, seed: int = 0) -> tuple[float, float]:
    """Return the 95% percentile bootstrap interval of the median (Efron, 1979).

    Args:
        values: measurements; one alone is its own interval.
        seed: of the resampling: the same values always give the same interval.
    """
    generator = torch.Generator().manual_seed(seed)
    count = len(values)
    picks = torch.randint(count, (_RESAMPLES, count), generator=generator)
    resampled = torch.tensor(values, dtype=torch.float64)[picks].sort(dim=1).values
    middles = resampled[:, [(count - 1) // 2, count // 2]].mean(dim=1)
    medians = middles.sort().values.tolist()
    beyond = int(_TAIL * _RESAMPLES)
    return medians[beyond], medians[-1 - beyond]


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Return each round's own ratio: what slowed one round slowed both of its sides."""
    return [a / b for a, b in zip(ours, theirs, strict=True)]
