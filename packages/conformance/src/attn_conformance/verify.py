"""Run the suite on a backend from a program; what `attn verify` does."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

from attn_conformance.expected_failures import ExpectedFailures
from attn_conformance.outcome import Outcome, Plan
from attn_conformance.report import Report, make_report
from attn_conformance.suite import DEFAULT_TIMEOUT_S, Suite

__all__ = ["verify"]


def _nothing(plan: Plan, outcome: Outcome | None) -> None:
    del plan, outcome


def verify(
    backend: str,
    *,
    depth: str = "quick",
    device: str = "cpu",
    xfails: str | Path | None = None,
    rules: Collection[str] = (),
    timeout_s: float = DEFAULT_TIMEOUT_S,
    on_progress: Callable[[Plan, Outcome | None], None] = _nothing,
) -> Report:
    """Run the contract's rules on a backend.

    The backend runs in a process of its own; this one imports neither it nor torch.

    Args:
        backend: a registered name, or "module:Class".
        depth: "quick" or "full": the same rules on more cases.
        device: a torch device of this machine.
        xfails: a file of expected failures.
        rules: names of rules to run; all of them by default.
        timeout_s: seconds that one case may take.
        on_progress: called with the plan and None at first, then with each case's outcome.

    Raises:
        AttnError: backend, device or rule is unknown, the backend does not load, or the file of
            expected failures is malformed.
    """
    expected = ExpectedFailures() if xfails is None else ExpectedFailures.read(xfails)
    outcomes: list[Outcome] = []
    with Suite(backend, depth=depth, device=device, rules=rules, timeout_s=timeout_s) as suite:
        on_progress(suite.plan, None)
        for entry in suite.plan.entries:
            outcome = expected.judge(entry, suite.run(entry))
            outcomes.append(outcome)
            on_progress(suite.plan, outcome)
        return make_report(suite.plan, outcomes, expected)
