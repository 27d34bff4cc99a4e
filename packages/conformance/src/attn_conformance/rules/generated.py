"""Batches that nobody thought of."""

from __future__ import annotations

from collections.abc import Iterable

from attn_conformance.case import Case
from attn_conformance.checks import check_numbers
from attn_conformance.drawn import drawn_cases
from attn_conformance.fit import Fit
from attn_conformance.rule import Depth, Rule

__all__ = ["RULES"]

_NUM_BATCHES = {Depth.QUICK: 12, Depth.FULL: 300}


def _drawn(depth: Depth, fit: Fit) -> Iterable[Case]:
    return drawn_cases(fit, _NUM_BATCHES[depth])


RULES = (
    Rule(
        name="generated",
        contract="Any batch of what the capability serves gets the specified answer.",
        make=_drawn,
        check=check_numbers,
    ),
)
