from __future__ import annotations

import pytest

from attn_conformance.outcome import Entry, Outcome, Plan, Status


def entry(**fields: object) -> Entry:
    record = {"index": 0, "rule": "sinks", "case": "long", "words": "Case()", **fields}
    return Entry(**record)  # type: ignore[arg-type]


def test_names_are_rule_and_case() -> None:
    assert entry().name == "sinks[long]"
    assert Outcome(rule="sinks", case="long", status=Status.PASSED).name == "sinks[long]"


@pytest.mark.parametrize(
    ("reasons", "excluded", "machines"),
    [
        ((), False, False),
        ((("sink", "sink=True"),), True, False),
        ((("memory", "8 GB"),), True, True),
        ((("memory", "8 GB"), ("sink", "sink=True")), True, False),
    ],
)
def test_whose_reason_it_is(
    reasons: tuple[tuple[str, str], ...], excluded: bool, machines: bool
) -> None:
    made = entry(reasons=reasons)
    assert (made.is_excluded, made.is_machines) == (excluded, machines)


def test_an_entry_survives_json() -> None:
    record = {
        "index": 3,
        "rule": "sinks",
        "case": "long",
        "words": "Case()",
        "reasons": [["sink", "sink=True"]],
        "problem": "",
    }
    made = Entry.from_dict(record)
    assert made.reasons == (("sink", "sink=True"),)
    assert made.index == 3


@pytest.mark.parametrize("status", list(Status))
def test_which_statuses_fail_a_run(status: Status) -> None:
    assert status.is_failure is (status in (Status.FAILED, Status.UNEXPECTED))


def test_a_plan_knows_the_cases_of_a_rule() -> None:
    entries = (entry(), entry(index=1, rule="window"), entry(index=2, case="short"))
    plan = Plan(facts={}, contracts={"sinks": "", "window": ""}, entries=entries)
    assert [item.index for item in plan.of_rule("sinks")] == [0, 2]


def test_an_outcome_as_json_has_rounded_seconds() -> None:
    outcome = Outcome(rule="r", case="c", status=Status.FAILED, message="m", seconds=0.123456)
    assert outcome.to_dict() == {
        "rule": "r",
        "case": "c",
        "status": "failed",
        "message": "m",
        "seconds": 0.1235,
    }
