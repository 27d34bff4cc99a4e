"""What is run and what came of it, as plain data; nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

__all__ = ["MACHINE_CODES", "Depth", "Entry", "Outcome", "Plan", "Status"]

MACHINE_CODES = frozenset({"memory", "device"})
"""Reasons that lie in the machine, not in the backend's capability."""


class Depth(StrEnum):
    """How many cases a rule is tried on; the rules are the same."""

    QUICK = "quick"
    FULL = "full"


class Status(StrEnum):
    """What became of one case."""

    PASSED = "passed"
    FAILED = "failed"
    EXCLUDED = "excluded"
    """The capability, or the machine, does not admit it: not run."""
    EXPECTED = "expected"
    """It failed, and the backend's author says why it does."""
    UNEXPECTED = "unexpected"
    """It passed, though it is listed as an expected failure: the line must go."""

    @property
    def is_failure(self) -> bool:
        """Whether the run has failed by this."""
        return self in (Status.FAILED, Status.UNEXPECTED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One case of one rule.

    Attributes:
        index: its place in the plan.
        rule: name of the rule.
        case: name of the case.
        words: the case as a constructor's call.
        reasons: (code, sentence) of each reason not to run it; empty: it is run.
        problem: why it could not even be planned, or "".
    """

    index: int
    rule: str
    case: str
    words: str
    reasons: tuple[tuple[str, str], ...] = ()
    problem: str = ""

    @property
    def name(self) -> str:
        """The rule and the case: "window[mixed-left-2]"."""
        return f"{self.rule}[{self.case}]"

    @property
    def is_excluded(self) -> bool:
        """Whether it is not run."""
        return bool(self.reasons)

    @property
    def is_machines(self) -> bool:
        """Whether it is the machine alone that keeps it from being run."""
        return self.is_excluded and all(code in MACHINE_CODES for code, _ in self.reasons)

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> Entry:
        """Return the entry of a record that went through JSON."""
        reasons = tuple((str(code), str(text)) for code, text in record["reasons"])
        return cls(**{**record, "reasons": reasons})


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All cases of a run, and what they are run on.

    Attributes:
        facts: backend, source, device, versions, depth: what a header shows.
        contracts: rule -> its sentence, in the order of the rules.
        entries: the cases, in the order of the rules.
        has_all_rules: no rule was left out by name.
    """

    facts: dict[str, str]
    contracts: dict[str, str]
    entries: tuple[Entry, ...]
    has_all_rules: bool = True

    def of_rule(self, rule: str) -> list[Entry]:
        """Return the cases of a rule."""
        return [entry for entry in self.entries if entry.rule == rule]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one case.

    Attributes:
        rule: name of the rule.
        case: name of the case.
        status: what became of it.
        message: of a failure, or why it was excluded or expected.
        seconds: how long it ran.
    """

    rule: str
    case: str
    status: Status
    message: str = ""
    seconds: float = 0.0

    @property
    def name(self) -> str:
        """The rule and the case: "window[mixed-left-2]"."""
        return f"{self.rule}[{self.case}]"

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-safe values."""
        return {
            "rule": self.rule,
            "case": self.case,
            "status": str(self.status),
            "message": self.message,
            "seconds": round(self.seconds, 4),
        }
