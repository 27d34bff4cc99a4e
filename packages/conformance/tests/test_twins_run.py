"""Runs of twins: what is caught, what survives, and what is the twin's own mistake."""

from __future__ import annotations

import pytest

from attn_conformance.reference_backend import ReferenceCall, ReferenceImpl
from attn_conformance.twins.__main__ import main
from attn_conformance.twins.catalogue import TWINS
from attn_conformance.twins.run import Verdict, run_twin, run_twins
from attn_conformance.twins.twin import Twin
from attn_shared.reference import ReferenceResult


class Right(Twin):
    """Not broken at all."""

    breaks = ("causal", "window")


class Clumsy(Twin):
    """Raises, and does not say that it does."""

    breaks = ("causal",)

    class impl(ReferenceImpl):
        def attend(self, call: ReferenceCall) -> ReferenceResult:
            raise AttributeError("a slip of the pen")


class Frank(Clumsy):
    """Raises, and says so."""

    raises = True


def twin_named(name: str) -> type[Twin]:
    return next(twin for twin in TWINS if twin.__name__ == name)


def test_a_backend_that_is_right_survives() -> None:
    verdicts = [(item.rule, item.verdict) for item in run_twin(Right)]

    assert verdicts == [("causal", Verdict.SURVIVED), ("window", Verdict.SURVIVED)]


def test_an_error_that_is_no_violation_is_the_twins_mistake() -> None:
    (finding,) = run_twin(Clumsy)

    assert finding.verdict is Verdict.MISTAKEN
    assert finding.words == "AttributeError: a slip of the pen"


def test_a_twin_may_be_broken_in_that_it_raises() -> None:
    (finding,) = run_twin(Frank)

    assert finding.verdict is Verdict.CAUGHT


def test_a_finding_names_the_case_and_what_was_found() -> None:
    (finding,) = run_twins([twin_named("DroppedChunks")])

    assert finding.twin == "DroppedChunks"
    assert finding.rule == "chunked_local"
    assert finding.case
    assert "output error" in finding.words


def test_what_a_cpu_cannot_show_is_not_run() -> None:
    (finding,) = run_twins([twin_named("Synchronises")])

    assert finding.verdict is Verdict.NOT_RUN
    assert "cuda" in finding.words


def test_the_command_shows_a_line_for_each_rule(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["LseInBits"])

    lines = capsys.readouterr().out.splitlines()
    assert status == 0
    assert [line.split()[:2] for line in lines[:-1]] == [["LseInBits", "caught"]] * 2
    assert lines[-1].startswith("1 twins on the rules they break: 2 caught,")


def test_the_command_fails_if_a_twin_survives(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attn_conformance.twins.__main__.TWINS", (Right,))
    monkeypatch.setattr("attn_conformance.twins.__main__.MLA_TWINS", ())

    status = main([])

    assert status == 1
    assert (
        capsys.readouterr()
        .out.splitlines()[-1]
        .startswith("1 twins on the rules they break: 2 survived,")
    )


def test_the_command_lists_the_twins_for_a_name_that_is_none(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["Nobody"])

    assert "no such twin: Nobody; there are" in capsys.readouterr().err
