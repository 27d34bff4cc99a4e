"""FlashInfer's wrappers over latents: one for each captured size, others lent to one step each."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from attn_cuda._fi_mla_plan import PlannedMLA

__all__ = ["LentPlan", "Wrappers"]


class LentPlan:
    """A wrapper's plan, as long as some step refers to it."""

    __slots__ = ("__weakref__", "planned")

    def __init__(self, planned: PlannedMLA) -> None:
        """Keep the wrapper that was planned."""
        self.planned = planned


class Wrappers:
    """Gives each step a wrapper that no other living step reads.

    Args:
        make: makes one, of at most so many pages and requests; 0 and 0: for any batch.
    """

    def __init__(self, make: Callable[[int, int], PlannedMLA]) -> None:
        self._make = make
        self._captured: dict[tuple[int, int], LentPlan] = {}
        self._lent: list[tuple[PlannedMLA, weakref.ref[LentPlan]]] = []

    def captured(self, num_reqs: int, num_tokens: int, most_pages: int) -> LentPlan:
        """Return the one wrapper of a captured size: a plan of it is for all that was captured."""
        key = (num_reqs, num_tokens)
        if key not in self._captured:
            self._captured[key] = LentPlan(self._make(most_pages, num_reqs))
        return self._captured[key]

    def lend(self) -> LentPlan:
        """Return a wrapper for one step; it comes back when nobody refers to the step any more."""
        self._lent, known = [], self._lent
        free: PlannedMLA | None = None
        for planned, lent in known:
            if lent() is None and free is None:
                free = planned
            else:
                self._lent.append((planned, lent))
        plan = LentPlan(free or self._make(0, 0))
        self._lent.append((plan.planned, weakref.ref(plan)))
        return plan
