from __future__ import annotations

import json
import subprocess
import sys

from attn_conformance.rules.catalogue import RULES


def ask(*requests: dict[str, object]) -> list[dict[str, object]]:
    """Run the worker on some requests and return its answers."""
    done = subprocess.run(
        [sys.executable, "-m", "attn_conformance.worker"],
        input="".join(json.dumps(request) + "\n" for request in requests),
        capture_output=True,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


PLAN = {
    "do": "plan",
    "backend": "attn_conformance.reference_backend:ReferenceBackend",
    "device": "cpu",
    "depth": "quick",
    "rules": [],
}


def test_a_plan_holds_every_rule_and_a_case_runs_by_its_index() -> None:
    plan, outcome = ask(PLAN, {"do": "run", "index": 0})
    assert plan["contracts"] == {rule.name: rule.contract for rule in RULES}
    entries = plan["entries"]
    assert isinstance(entries, list)
    assert entries[0]["words"].startswith("Case(name=")
    assert outcome["kind"] == "outcome"
    assert outcome["message"] == ""
    assert outcome["is_usable"] is True


def test_a_plan_that_cannot_be_made_is_an_answer() -> None:
    (answer,) = ask({**PLAN, "backend": "NO_SUCH"})
    assert answer["kind"] == "error"
    assert answer["class"] == "UnknownNameError"
