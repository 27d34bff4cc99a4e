from __future__ import annotations

import json

from attn_conformance.expected_failures import ExpectedFailures
from attn_conformance.outcome import Entry, Outcome, Plan, Status
from attn_conformance.report import make_report

STATUSES = {
    "a": Status.PASSED,
    "b": Status.FAILED,
    "c": Status.EXPECTED,
    "d": Status.UNEXPECTED,
    "e": Status.EXCLUDED,
}
REASONS = (("sink", "sink=True"),)


def plan_of(*cases: str) -> Plan:
    entries = tuple(
        Entry(index=i, rule="r", case=case, words="", reasons=REASONS if case == "e" else ())
        for i, case in enumerate(cases)
    )
    return Plan(facts={"backend": "X"}, contracts={"r": "It holds.", "s": "So."}, entries=entries)


def outcomes_of(*cases: str) -> list[Outcome]:
    return [Outcome(rule="r", case=case, status=STATUSES[case], seconds=0.5) for case in cases]


def test_each_status_is_counted() -> None:
    report = make_report(plan_of(*"abcde"), outcomes_of(*"abcde"), ExpectedFailures())
    first, second = report.rules
    assert (first.run, first.passed, first.failed, first.expected, first.excluded) == (
        4,
        1,
        2,
        1,
        1,
    )
    assert first.reasons == (("sink=True", 1),)
    assert (second.run, second.excluded) == (0, 0)
    assert report.total().run == 4
    assert [outcome.case for outcome in report.failures] == ["b", "d"]
    assert report.seconds == 2.5
    assert not report.ok


def test_passes_and_expected_failures_are_fine() -> None:
    report = make_report(plan_of(*"ace"), outcomes_of(*"ace"), ExpectedFailures())
    assert report.ok
    assert report.problems == ()


def test_a_run_without_a_case_fails() -> None:
    report = make_report(plan_of("e"), outcomes_of("e"), ExpectedFailures())
    assert report.problems == ("no case was run",)
    assert not report.ok


def test_stale_lines_and_shortfalls_are_problems_of_a_whole_run_alone() -> None:
    known = ExpectedFailures.parse("r[z]: gone", "x.txt")
    whole = make_report(plan_of("a"), outcomes_of("a"), known)
    assert whole.problems == ("x.txt:1: r[z] matches no case",)
    part = make_report(plan_of("a"), outcomes_of("a"), known, is_whole=False)
    assert part.ok


def test_a_narrowed_first_party_backend_is_a_problem() -> None:
    plan = plan_of("a")
    narrowed = Plan(facts={"backend": "TORCH_SDPA"}, contracts={"sinks": ""}, entries=plan.entries)
    report = make_report(narrowed, outcomes_of("a"), ExpectedFailures())
    (problem,) = report.problems
    assert problem.startswith("sinks: 0 cases, and TORCH_SDPA promises")


def test_as_json_it_has_a_version_counts_and_what_was_run() -> None:
    report = make_report(plan_of(*"abe"), outcomes_of(*"abe"), ExpectedFailures())
    record = json.loads(json.dumps(report.to_dict()))
    assert record["schema_version"] == 1
    assert record["ok"] is False
    assert record["total"] == {"run": 2, "passed": 1, "failed": 1, "expected": 0, "excluded": 1}
    assert [item["case"] for item in record["outcomes"]] == ["a", "b"]
    assert record["rules"][0]["reasons"] == [{"reason": "sink=True", "cases": 1}]
