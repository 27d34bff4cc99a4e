"""Failures that a backend's author knows of: a text file, a line and a reason each.

    # comments and empty lines are skipped
    sinks[long]: the split-KV kernel of version 2.1 adds the sink in each split (issue 77)
    far_blocks[*]: 32-bit offsets; max 65536 blocks

Left of the colon stand a rule and a pattern of case names ("*" and "?" as in a shell). A listed
case that passes, and a line that matches no case, fail the run, so that the list stays true.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

from attn_conformance.outcome import Entry, Outcome, Plan, Status
from attn_shared.errors import InvalidInputError

__all__ = ["ExpectedFailure", "ExpectedFailures"]

_LINE = re.compile(r"^(?P<rule>\w+)\[(?P<pattern>[^\]]+)\]\s*:\s*(?P<reason>\S.*)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedFailure:
    """One line.

    Attributes:
        rule: name of the rule.
        pattern: of case names.
        reason: why such a case fails.
        place: file and line.
    """

    rule: str
    pattern: str
    reason: str
    place: str

    def matches(self, entry: Entry) -> bool:
        """Whether the line speaks of a case."""
        return entry.rule == self.rule and fnmatchcase(entry.case, self.pattern)

    def __str__(self) -> str:
        """Read as the line's place and what it names."""
        return f"{self.place}: {self.rule}[{self.pattern}]"


@dataclass(frozen=True, slots=True)
class ExpectedFailures:
    """All lines of a file; none is fine."""

    lines: tuple[ExpectedFailure, ...] = ()

    @classmethod
    def read(cls, path: str | Path) -> ExpectedFailures:
        """Read a file.

        Raises:
            InvalidInputError: it cannot be read, or a line is not "rule[pattern]: reason".
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidInputError.for_argument(
                "expected failures", f"{str(path)!r} ({error})", "a text file"
            ) from error
        return cls.parse(text, str(path))

    @classmethod
    def parse(cls, text: str, path: str) -> ExpectedFailures:
        """Read a text; `path` is for messages.

        Raises:
            InvalidInputError: a line is not "rule[pattern]: reason".
        """
        found = []
        for number, line in enumerate(text.splitlines(), start=1):
            stripped = line.strip()
            if not stripped or stripped.startswith("#"):
                continue
            match = _LINE.match(stripped)
            if match is None:
                raise InvalidInputError.for_argument(
                    f"{path}:{number}",
                    repr(stripped),
                    '"rule[case-pattern]: reason"; the reason is required',
                )
            found.append(ExpectedFailure(place=f"{path}:{number}", **match.groupdict()))
        return cls(tuple(found))

    def of(self, entry: Entry) -> ExpectedFailure | None:
        """Return the first line that speaks of a case."""
        return next((line for line in self.lines if line.matches(entry)), None)

    def judge(self, entry: Entry, outcome: Outcome) -> Outcome:
        """Return the outcome in the light of the list."""
        line = self.of(entry)
        if line is None or outcome.status not in (Status.PASSED, Status.FAILED):
            return outcome
        if outcome.status is Status.FAILED:
            return replace(outcome, status=Status.EXPECTED, message=line.reason)
        words = f"listed as an expected failure ({line}) and passes: remove the line"
        return replace(outcome, status=Status.UNEXPECTED, message=words)

    def stale(self, plan: Plan) -> list[str]:
        """Return a sentence for each line that matches no case that is run.

        A line about a rule that was left out by name is not judged.
        """
        sentences = []
        for line in self.lines:
            matched = [entry for entry in plan.entries if line.matches(entry)]
            if not matched and (plan.has_all_rules or line.rule in plan.contracts):
                sentences.append(f"{line} matches no case")
            elif matched and all(entry.is_excluded for entry in matched):
                sentences.append(f"{line} matches only cases that are excluded")
        return sentences
