from __future__ import annotations

from pathlib import Path

import pytest

from attn_conformance.expected_failures import ExpectedFailures
from attn_conformance.outcome import Entry, Outcome, Plan, Status
from attn_shared.errors import InvalidInputError

TEXT = """
# what is known
sinks[long]: adds the sink in each split (issue 77)
far_blocks[*]: 32-bit offsets
"""


def entry(rule: str, case: str, *, is_excluded: bool = False) -> Entry:
    reasons = (("code", "reason"),) if is_excluded else ()
    return Entry(index=0, rule=rule, case=case, words="", reasons=reasons)


def outcome(status: Status) -> Outcome:
    return Outcome(rule="sinks", case="long", status=status, message="off by one")


def plan_of(*entries: Entry, has_all_rules: bool = True) -> Plan:
    contracts = {item.rule: "" for item in entries}
    return Plan(facts={}, contracts=contracts, entries=entries, has_all_rules=has_all_rules)


def test_lines_have_a_rule_a_pattern_and_a_reason() -> None:
    first, second = ExpectedFailures.parse(TEXT, "x.txt").lines
    assert (first.rule, first.pattern) == ("sinks", "long")
    assert first.reason == "adds the sink in each split (issue 77)"
    assert first.place == "x.txt:3"
    assert second.matches(entry("far_blocks", "many-blocks"))
    assert not second.matches(entry("blocks", "many-blocks"))


@pytest.mark.parametrize(
    "line", ["sinks[long]", "sinks[long]:", "sinks[long]:   ", "sinks: why", "[long]: why", "x"]
)
def test_a_line_without_one_of_them_is_refused_with_its_place(line: str) -> None:
    with pytest.raises(InvalidInputError, match=r"x\.txt:2 .*the reason is required"):
        ExpectedFailures.parse(f"\n{line}\n", "x.txt")


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="missing"):
        ExpectedFailures.read(tmp_path / "missing")


def test_a_listed_failure_is_expected_with_its_reason() -> None:
    known = ExpectedFailures.parse(TEXT, "x.txt")
    judged = known.judge(entry("sinks", "long"), outcome(Status.FAILED))
    assert judged.status is Status.EXPECTED
    assert judged.message == "adds the sink in each split (issue 77)"


def test_a_listed_case_that_passes_fails_the_run() -> None:
    known = ExpectedFailures.parse(TEXT, "x.txt")
    judged = known.judge(entry("sinks", "long"), outcome(Status.PASSED))
    assert judged.status is Status.UNEXPECTED
    assert "x.txt:3" in judged.message
    assert "remove the line" in judged.message


@pytest.mark.parametrize("status", [Status.PASSED, Status.FAILED, Status.EXCLUDED])
def test_what_is_not_listed_or_not_run_stays_as_it_is(status: Status) -> None:
    known = ExpectedFailures.parse(TEXT, "x.txt")
    assert known.judge(entry("sinks", "short"), outcome(status)) == outcome(status)
    excluded = outcome(Status.EXCLUDED)
    assert known.judge(entry("sinks", "long"), excluded) == excluded


def test_lines_that_match_nothing_that_is_run_are_stale() -> None:
    known = ExpectedFailures.parse(TEXT, "x.txt")
    long, far = entry("sinks", "long"), entry("far_blocks", "many-blocks")
    assert known.stale(plan_of(long, far)) == []
    assert known.stale(plan_of(long)) == ["x.txt:4: far_blocks[*] matches no case"]
    excluded = entry("far_blocks", "many-blocks", is_excluded=True)
    (sentence,) = known.stale(plan_of(long, excluded))
    assert sentence.endswith("matches only cases that are excluded")


def test_lines_about_rules_that_were_left_out_are_not_judged() -> None:
    known = ExpectedFailures.parse(TEXT, "x.txt")
    assert known.stale(plan_of(entry("sinks", "long"), has_all_rules=False)) == []
