from __future__ import annotations

from pathlib import Path

from attn_conformance.outcome import Outcome, Plan, Status
from attn_conformance.verify import verify


def test_a_right_backend_keeps_the_contract_and_progress_is_told() -> None:
    told: list[Outcome | None] = []

    def on_progress(plan: Plan, outcome: Outcome | None) -> None:
        told.append(outcome)

    report = verify(
        "attn_conformance.reference_backend:ReferenceBackend",
        rules=["causal", "window"],
        on_progress=on_progress,
    )
    assert report.ok
    assert told[0] is None
    assert tuple(told[1:]) == report.outcomes


def test_known_failures_are_expected(tmp_path: Path) -> None:
    known = tmp_path / "known.txt"
    known.write_text("construction[softcap]: softcap comes later\n", encoding="utf-8")
    report = verify("conformance_backends:Picky", rules=["construction"], xfails=known)
    assert report.ok
    (expected,) = [o for o in report.outcomes if o.status is Status.EXPECTED]
    assert expected.name == "construction[softcap]"
    assert expected.message == "softcap comes later"


def test_a_narrowed_capability_of_a_first_party_backend_fails() -> None:
    report = verify("conformance_backends:WithoutSinks", rules=["sinks"])
    assert not report.failures
    assert not report.ok
    assert report.problems[0] == "no case was run"
    assert "TORCH_SDPA promises" in report.problems[1]
