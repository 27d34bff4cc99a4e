from __future__ import annotations

from attn_conformance.expected_failures import ExpectedFailures
from attn_conformance.outcome import Entry, Outcome, Plan, Status
from attn_conformance.report import Report, make_report
from attn_conformance.table import failure_lines, header_lines, rendered

FACTS = {
    "backend": "X",
    "asked_for": "package.module:X",
    "source": "package.module",
    "device": "cpu: A Processor (x86_64)",
    "torch": "2.13.0",
    "python": "3.11.7",
    "dtypes": "bfloat16",
    "depth": "quick",
    "suite": "attn-conformance 0.1.0",
}


def report_of(status: Status) -> Report:
    reasons = (("sink", "sink=True (allowed: False)"),)
    entries = (
        Entry(index=0, rule="window", case="a", words=""),
        Entry(index=1, rule="sinks", case="b", words="", reasons=reasons),
    )
    plan = Plan(facts=FACTS, contracts={"window": "", "sinks": ""}, entries=entries)
    outcomes = [
        Outcome(rule="window", case="a", status=status, message="off by one"),
        Outcome(rule="sinks", case="b", status=Status.EXCLUDED),
    ]
    return make_report(plan, outcomes, ExpectedFailures())


def test_the_header_says_what_is_tested_on_what() -> None:
    text = "\n".join(header_lines(FACTS))
    for fact in ("X (package.module:X)", "A Processor", "bfloat16", "torch 2.13.0", "depth quick"):
        assert fact in text


def test_a_registered_name_is_shown_once() -> None:
    assert header_lines({**FACTS, "asked_for": "X"})[0] == "backend: X from package.module"


def test_the_table_has_a_line_per_rule_and_the_verdict() -> None:
    text = rendered(report_of(Status.PASSED), width=100, color=False)
    lines = [line.split() for line in text.splitlines()]
    assert ["window", "1", "-", "-", "-"] in lines
    assert ["sinks", "-", "-", "-", "1", "sink=True", "x1"] in lines
    assert ["all", "1", "-", "-", "1"] in lines
    assert "X: keeps the contract" in text
    assert "\x1b" not in text


def test_failures_and_problems_are_shown() -> None:
    report = report_of(Status.FAILED)
    assert list(failure_lines(report)) == ["window[a]: off by one"]
    text = rendered(report, width=100, color=True)
    assert "FAILED" in text
    assert "\x1b" in text
