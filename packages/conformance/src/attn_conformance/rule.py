"""A rule: one sentence of the contract, the batches it is tried on, and what must then hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from attn_conformance.case import Case
from attn_conformance.fit import Fit
from attn_conformance.outcome import Depth
from attn_shared.capability import Capability, Reason
from attn_shared.device import DeviceFacts

if TYPE_CHECKING:
    from attn_conformance.subject import Subject

__all__ = ["Depth", "Rule", "Violation"]


class Violation(Exception):
    """A backend breaks the contract; the message says how, with the numbers."""


def _by_capability(subject: Subject, case: Case) -> tuple[Reason, ...]:
    return subject.excluded(case)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One sentence of the contract that a backend can break.

    Attributes:
        name: lower case with underscores, unique.
        contract: the sentence.
        make: returns the cases for a depth and what a capability takes.
        check: runs one case; raises `Violation` where the sentence does not hold. Anything else
            that it raises is a failure as well.
        excluded: why a case is not run; by default the capability's reasons.
    """

    name: str
    contract: str
    make: Callable[[Depth, Fit], Iterable[Case]]
    check: Callable[[Subject, Case], None]
    excluded: Callable[[Subject, Case], tuple[Reason, ...]] = _by_capability

    def cases(
        self, depth: Depth, capability: Capability, facts: DeviceFacts | None = None
    ) -> tuple[Case, ...]:
        """Return the cases, each of another name.

        Args:
            depth: how many.
            capability: of the backend.
            facts: of the device; None: a CPU.

        Raises:
            ValueError: two cases of one name: a mistake in the rule.
        """
        cases = tuple(self.make(depth, Fit(capability, facts)))
        names = [case.name for case in cases]
        if len(set(names)) < len(names):
            repeated = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"rule {self.name} has two cases named {repeated!r}")
        return cases
