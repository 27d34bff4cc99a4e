from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
from conformance_backends import COMPILER

from attn_conformance.outcome import Outcome, Status
from attn_conformance.suite import Suite
from attn_shared.errors import InvalidInputError, PluginError, UnknownNameError


@pytest.fixture(scope="module")
def by_scale() -> Iterator[dict[str, Outcome]]:
    """What comes of a backend that crashes, hangs, exits and raises, case by case."""
    with Suite("conformance_backends:ByScale", rules=["scale", "causal"], timeout_s=5) as suite:
        wanted = [entry for entry in suite.plan.entries if not entry.case.startswith("mixed-")]
        yield {entry.name: suite.run(entry) for entry in wanted}


def test_a_crash_is_one_failed_case_with_its_last_words(by_scale: dict[str, Outcome]) -> None:
    outcome = by_scale["scale[decode-0.05]"]
    assert outcome.status is Status.FAILED
    assert outcome.message.startswith("the process died: signal SIGSEGV")
    assert "in attend" in outcome.message


def test_a_hang_is_one_failed_case_after_its_time(by_scale: dict[str, Outcome]) -> None:
    outcome = by_scale["scale[decode-0.7]"]
    assert outcome.status is Status.FAILED
    assert outcome.message == "no answer within 5 s: the process was ended"
    assert outcome.seconds == 5


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="the system lists no children")
def test_a_compiler_that_a_case_has_started_ends_with_it() -> None:
    with Suite("conformance_backends:Compiling", rules=["causal"], timeout_s=2) as suite:
        outcome = suite.run(suite.plan.entries[0])
    assert "a kernel compiled at first use counts (--compile-jobs N: before)" in outcome.message
    lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.is_file()]
    assert not any(COMPILER.encode() in line for line in lines)


def test_an_exit_is_one_failed_case(by_scale: dict[str, Outcome]) -> None:
    outcome = by_scale["scale[decode--0.3]"]
    assert outcome.status is Status.FAILED
    assert "exit code 3" in outcome.message


def test_an_exception_is_one_failed_case_with_its_place(by_scale: dict[str, Outcome]) -> None:
    outcome = by_scale["scale[decode-0.0]"]
    assert outcome.status is Status.FAILED
    assert outcome.message.startswith("raised KeyError: 'no such tile'")
    assert "conformance_backends.py" in outcome.message


def test_the_run_goes_on_and_prints_of_the_backend_do_no_harm(
    by_scale: dict[str, Outcome],
) -> None:
    others = [outcome for name, outcome in by_scale.items() if name.startswith("causal")]
    assert len(others) >= 4
    assert {outcome.status for outcome in others} == {Status.PASSED}


@pytest.mark.parametrize("backend", ["WrongDtype", "WrongShape", "NoTensor"])
def test_another_kind_of_output_is_a_failed_case(backend: str) -> None:
    with Suite(f"conformance_backends:{backend}", rules=["causal", "output_none"]) as suite:
        outcomes = [suite.run(entry) for entry in suite.plan.entries]
    assert {outcome.status for outcome in outcomes} == {Status.FAILED}


def test_a_rule_that_hangs_is_given_up_after_some_cases() -> None:
    with Suite("conformance_backends:ByScale", rules=["scale"], timeout_s=0.2) as suite:
        hanging = [entry for entry in suite.plan.entries if entry.case.endswith("-0.7")]
        outcomes = [suite.run(hanging[i % len(hanging)]) for i in range(4)]
    assert [outcome.message.split(":")[0] for outcome in outcomes] == [
        *["no answer within 0.2 s"] * 3,
        "not tried",
    ]


def test_excluded_cases_are_told_with_the_capabilitys_reasons() -> None:
    with Suite("conformance_backends:Blocks16", rules=["head_sizes"]) as suite:
        outcomes = {entry.case: suite.run(entry) for entry in suite.plan.entries}
    assert outcomes["64"].status is Status.PASSED
    assert outcomes["80"].status is Status.EXCLUDED
    assert outcomes["80"].message == "head_size=80 (allowed: 64)"


def test_the_plan_says_what_is_tested_on_what() -> None:
    with Suite("conformance_backends:Blocks16", rules=["scale"]) as suite:
        facts = suite.plan.facts
        assert facts["backend"] == "BLOCKS_16"
        assert facts["source"] == "conformance_backends"
        assert facts["dtypes"] == "bfloat16"
        assert facts["device"].startswith("cpu: ")
        assert list(suite.plan.contracts) == ["scale"]
        assert not suite.plan.has_all_rules
        assert [entry.index for entry in suite.plan.entries] == list(range(len(suite.plan.entries)))


def test_a_constructor_that_disagrees_with_the_capability_is_a_failed_case() -> None:
    with Suite("conformance_backends:Picky", rules=["construction"]) as suite:
        outcomes = [suite.run(entry) for entry in suite.plan.entries]
    failed = [outcome for outcome in outcomes if outcome.status is Status.FAILED]
    assert [outcome.case for outcome in failed] == ["softcap"]
    assert "the constructor raises ValueError: no softcap here" in failed[0].message


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"backend": "NO_SUCH"}, UnknownNameError, "unknown backend 'NO_SUCH'"),
        ({"backend": "conformance_backends:NotABackend"}, PluginError, "not a subclass"),
        ({"backend": "conformance_backends:BrokenCapability"}, PluginError, "no driver"),
        ({"rules": ["no_such_rule"]}, UnknownNameError, "unknown rule"),
        ({"depth": "deep"}, UnknownNameError, "unknown depth 'deep'"),
        ({"timeout_s": 0}, InvalidInputError, "timeout_s"),
    ],
)
def test_what_cannot_be_run_is_an_error_of_this_process(
    options: dict[str, object], error: type[Exception], words: str
) -> None:
    wanted = {"backend": "conformance_backends:Picky", **options}
    with pytest.raises(error, match=words):
        Suite(**wanted)  # type: ignore[arg-type]


def test_closing_twice_is_fine_and_a_closed_suite_starts_again() -> None:
    suite = Suite("conformance_backends:Picky", rules=["causal"])
    suite.close()
    suite.close()
    first = next(islice(suite.plan.entries, 1))
    assert suite.run(first).status is Status.PASSED
    suite.close()
