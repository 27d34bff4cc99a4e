"""What a run came to: counts per rule, failures, and what is wrong with the run as a whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from attn_conformance.expected_failures import ExpectedFailures
from attn_conformance.golden import golden_of, shortfalls
from attn_conformance.outcome import Outcome, Plan, Status

__all__ = ["SCHEMA_VERSION", "Report", "RuleCount", "make_report"]

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleCount:
    """One rule's line of the table.

    Attributes:
        rule: its name.
        contract: its sentence.
        run: cases that were run.
        passed: of those.
        failed: of those, unexpected passes included.
        expected: of those, failures that the author knows of.
        excluded: cases that were not run.
        reasons: why not: (sentence, how many cases), most frequent first.
    """

    rule: str
    contract: str
    run: int
    passed: int
    failed: int
    expected: int
    excluded: int
    reasons: tuple[tuple[str, int], ...]

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-safe values."""
        return {
            "rule": self.rule,
            "contract": self.contract,
            "run": self.run,
            "passed": self.passed,
            "failed": self.failed,
            "expected": self.expected,
            "excluded": self.excluded,
            "reasons": [{"reason": reason, "cases": count} for reason, count in self.reasons],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A whole run.

    Attributes:
        facts: what was tested on what.
        rules: a count per rule, in their order.
        outcomes: of every case.
        problems: what is wrong beside single cases: a sentence each.
    """

    facts: dict[str, str]
    rules: tuple[RuleCount, ...]
    outcomes: tuple[Outcome, ...]
    problems: tuple[str, ...]

    @property
    def failures(self) -> tuple[Outcome, ...]:
        """Cases that failed, or passed although they were expected not to."""
        return tuple(outcome for outcome in self.outcomes if outcome.status.is_failure)

    @property
    def ok(self) -> bool:
        """Whether the backend keeps the contract as far as it was tried."""
        return not self.failures and not self.problems

    @property
    def seconds(self) -> float:
        """Time spent in cases."""
        return sum(outcome.seconds for outcome in self.outcomes)

    def total(self) -> RuleCount:
        """Return the sums over all rules."""
        sums = {
            name: sum(getattr(rule, name) for rule in self.rules)
            for name in ("run", "passed", "failed", "expected", "excluded")
        }
        return RuleCount(rule="all", contract="", reasons=(), **sums)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-safe values; outcomes of cases that were run, and not excluded ones."""
        return {
            "schema_version": SCHEMA_VERSION,
            "ok": self.ok,
            "facts": self.facts,
            "total": {
                key: value
                for key, value in self.total().to_dict().items()
                if isinstance(value, int)
            },
            "seconds": round(self.seconds, 3),
            "rules": [rule.to_dict() for rule in self.rules],
            "problems": list(self.problems),
            "outcomes": [
                outcome.to_dict()
                for outcome in self.outcomes
                if outcome.status is not Status.EXCLUDED
            ],
        }


def make_report(
    plan: Plan,
    outcomes: Iterable[Outcome],
    expected: ExpectedFailures,
    *,
    is_whole: bool = True,
) -> Report:
    """Count.

    Args:
        plan: what there was to run.
        outcomes: what became of it.
        expected: known failures.
        is_whole: all planned cases were run, so that what is missing is a problem.
    """
    listed = tuple(outcomes)
    problems: list[str] = []
    if not any(outcome.status is not Status.EXCLUDED for outcome in listed):
        problems.append("no case was run")
    if is_whole:
        problems += expected.stale(plan)
        problems += shortfalls(plan, golden_of(plan.facts["backend"]))
    return Report(
        facts=plan.facts,
        rules=tuple(_count(plan, rule, listed) for rule in plan.contracts),
        outcomes=listed,
        problems=tuple(problems),
    )


def _count(plan: Plan, rule: str, outcomes: Sequence[Outcome]) -> RuleCount:
    counts = Counter(outcome.status for outcome in outcomes if outcome.rule == rule)
    reasons = Counter(text for entry in plan.of_rule(rule) for _, text in entry.reasons)
    return RuleCount(
        rule=rule,
        contract=plan.contracts[rule],
        run=counts.total() - counts[Status.EXCLUDED],
        passed=counts[Status.PASSED],
        failed=counts[Status.FAILED] + counts[Status.UNEXPECTED],
        expected=counts[Status.EXPECTED],
        excluded=counts[Status.EXCLUDED],
        reasons=tuple(reasons.most_common()),
    )
