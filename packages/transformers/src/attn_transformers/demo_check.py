"""Greedy generation with what a comparison needs, and the comparison."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Check", "Difference", "Run", "compare", "generate_greedily"]

OnProgress = Callable[[str, int, int], None]
"""Called with (what is being done, tokens done, most tokens)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What was generated.

    Attributes:
        tokens: (B, steps) new tokens.
        gaps: (B, steps) greatest logit minus the second greatest: how near each choice was.
        prefill_s: seconds to the first token.
        decode_s: seconds from the first token to the last.
    """

    tokens: tuple[tuple[int, ...], ...]
    gaps: tuple[tuple[float, ...], ...]
    prefill_s: float
    decode_s: float

    @property
    def num_steps(self) -> int:
        """Forward passes: the longest row's tokens."""
        return len(self.tokens[0])

    @property
    def tokens_per_s(self) -> float | None:
        """Steps per second after the first token; None where there was one step."""
        if self.num_steps < 2:
            return None
        return (self.num_steps - 1) / self.decode_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first step at which two runs chose different tokens.

    Attributes:
        row, step: where.
        tokens: (ours, the other's).
        gaps: greatest minus second greatest logit (ours, the other's); near zero means that
            rounding decided.
    """

    row: int
    step: int
    tokens: tuple[int, int]
    gaps: tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A comparison of two runs.

    Attributes:
        num_tokens: tokens compared.
        difference: the first one; None where all are equal.
    """

    num_tokens: int
    difference: Difference | None

    @property
    def is_equal(self) -> bool:
        """Whether every token is the same."""
        return self.difference is None


class _Clock:
    """A streamer, as `generate` calls it, that notes when each token came."""

    def __init__(self, on_progress: OnProgress, max_new_tokens: int) -> None:
        self.times: list[float] = []
        self._on_progress = on_progress
        self._max_new_tokens = max_new_tokens

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt at first, then a step's tokens."""
        self.times.append(time.perf_counter())
        self._on_progress("tokens", len(self.times) - 1, self._max_new_tokens)

    def end(self) -> None:
        """Do nothing."""


def generate_greedily(
    model: Any,
    inputs: dict[str, torch.Tensor],
    max_new_tokens: int,
    cache: Any,
    on_progress: OnProgress,
) -> Run:
    """Generate the likeliest tokens.

    Args:
        model: a transformers model for causal language modelling.
        inputs: input_ids and attention_mask, (B, tokens).
        max_new_tokens: most steps.
        cache: a transformers cache; None: its own.
        on_progress: told after each step.
    """
    clock = _Clock(on_progress, max_new_tokens)
    options = {} if cache is None else {"cache": cache}
    result = model.generate(
        **inputs,
        **options,
        max_new_tokens=max_new_tokens,
        do_sample=False,
        streamer=clock,
        output_logits=True,
        return_dict_in_generate=True,
    )
    tokens = result.sequences[:, inputs["input_ids"].shape[1] :]
    best = torch.stack([logits.float().topk(2).values for logits in result.logits], dim=1)
    gaps = best[..., 0] - best[..., 1]
    start, first, last = clock.times[0], clock.times[1], clock.times[-1]
    return Run(
        tokens=tuple(map(tuple, tokens.tolist())),
        gaps=tuple(map(tuple, gaps.tolist())),
        prefill_s=first - start,
        decode_s=last - first,
    )


def compare(ours: Run, other: Run) -> Check:
    """Return the first difference in the order of steps, if any; a row that ends early differs."""
    num_tokens = sum(map(len, ours.tokens))
    for step in range(max(ours.num_steps, other.num_steps)):
        for row in range(len(ours.tokens)):
            pair = [(run.tokens[row], run.gaps[row]) for run in (ours, other)]
            chosen = tuple(tokens[step] if step < len(tokens) else -1 for tokens, _ in pair)
            if chosen[0] != chosen[1]:
                gaps = tuple(gap[step] if step < len(gap) else 0.0 for _, gap in pair)
                difference = Difference(
                    row=row,
                    step=step,
                    tokens=(chosen[0], chosen[1]),
                    gaps=(gaps[0], gaps[1]),
                )
                return Check(num_tokens=num_tokens, difference=difference)
    return Check(num_tokens=num_tokens, difference=None)
