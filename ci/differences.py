"""Differences between two deciders, and the named rules that must explain each of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "SELECTIONS",
    "Difference",
    "Explained",
    "Rule",
    "Test",
    "compare_reasons",
    "explain",
    "selection_rule",
]

SELECTIONS = ("decisions", "forced")
"""Files of recorded selections, automatic and by name."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One thing that is decided otherwise here than was recorded.

    Attributes:
        file: whose row it is.
        row: the recorded row.
        subject: what is decided: a backend, "order", "missing", ...
        code: which part of it: a reason's code, a name.
        side: "here" or "there": who refuses, or who has more.
        here: what attn decides.
        there: what was recorded.
    """

    file: str
    row: Mapping[str, Any]
    subject: str
    code: str
    side: str
    here: object = None
    there: object = None

    @property
    def config(self) -> Mapping[str, Any]:
        """What was asked; the row itself where it has no part of that name."""
        found: Mapping[str, Any] = self.row.get("config", self.row)
        return found

    def describe(self) -> str:
        """One line for a report of what nothing explains."""
        name = self.row.get("id", "")
        place = self.row.get("arch", "")
        return (
            f"{self.file} {name} {place}: {self.subject} {self.code} ({self.side}): "
            f"here {self.here}, recorded {self.there}; asked {dict(self.config)}"
        )


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Why attn decides otherwise, and how that is known.

    Attributes:
        name: one sentence.
        files: whose rows it is about.
        reason: why attn's answer is the better one, or what is still missing.
        evidence: an upstream issue, a kernel's constraint, a measurement, a document of facts.
        explains: whether it accounts for a difference.
    """

    name: str
    files: tuple[str, ...]
    reason: str
    evidence: str
    explains: Callable[[Difference], bool]


Test = Callable[[Difference], bool]
"""Whether a rule accounts for a difference."""


def selection_rule(name: str, explains: Test, *, reason: str, evidence: str) -> Rule:
    """Return a rule about recorded selections."""
    return Rule(name=name, files=SELECTIONS, reason=reason, evidence=evidence, explains=explains)


def compare_reasons(
    row: Mapping[str, Any], file: str, name: str, here: set[str], there: set[str]
) -> Iterator[Difference]:
    """Yield each reason against a backend that one side alone has.

    Args:
        row: the recorded row.
        file: whose row it is.
        name: the backend.
        here: codes of attn's reasons.
        there: recorded ones, by attn's codes.
    """
    for side, codes in (("here", here - there), ("there", there - here)):
        for code in sorted(codes):
            yield Difference(
                file=file,
                row=row,
                subject=name,
                code=code,
                side=side,
                here=sorted(here),
                there=sorted(there),
            )


@dataclass(kw_only=True)
class Explained:
    """What the rules account for.

    Attributes:
        counts: differences by rule.
        by_file: differences by the file of their rows.
        examples: a difference of each rule.
        unexplained: what no rule accounts for.
    """

    counts: Counter[str] = field(default_factory=Counter)
    by_file: Counter[str] = field(default_factory=Counter)
    examples: dict[str, Difference] = field(default_factory=dict)
    unexplained: list[Difference] = field(default_factory=list)

    def unused(self, rules: Iterable[Rule]) -> list[str]:
        """Rules that account for nothing."""
        return [rule.name for rule in rules if not self.counts[rule.name]]


def explain(differences: Iterable[Difference], rules: Iterable[Rule]) -> Explained:
    """Give each difference to the first rule that accounts for it."""
    found, known = Explained(), list(rules)
    for difference in differences:
        found.by_file[difference.file] += 1
        rule = next(
            (r for r in known if difference.file in r.files and r.explains(difference)), None
        )
        if rule is None:
            found.unexplained.append(difference)
            continue
        found.counts[rule.name] += 1
        found.examples.setdefault(rule.name, difference)
    return found
