"""Run the suite on a backend from a program; what `attn verify` does."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Collection
from pathlib import Path

from attn_conformance.expected_failures import ExpectedFailures
from attn_conformance.outcome import Outcome, Plan
from attn_conformance.report import Report, make_report
from attn_conformance.suite import DEFAULT_TIMEOUT_S, Suite
from attn_shared.errors import InvalidInputError, UnsupportedOptionError

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
    compile_jobs: int | None = None,
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
        compile_jobs: compile the kernels that the cases need first, so many files side by side;
            for backends whose library compiles at first use. None: as the cases come.
        on_progress: called with the plan and None at first, then with each case's outcome.

    Raises:
        AttnError: backend, device or rule is unknown, the backend does not load, or the file of
            expected failures is malformed; or kernels were not compiled ahead.
    """
    if compile_jobs is not None:
        _compile_ahead(backend, compile_jobs, device, depth, rules)
    expected = ExpectedFailures() if xfails is None else ExpectedFailures.read(xfails)
    outcomes: list[Outcome] = []
    with Suite(backend, depth=depth, device=device, rules=rules, timeout_s=timeout_s) as suite:
        on_progress(suite.plan, None)
        for entry in suite.plan.entries:
            outcome = expected.judge(entry, suite.run(entry))
            outcomes.append(outcome)
            on_progress(suite.plan, outcome)
        return make_report(suite.plan, outcomes, expected)


def _compile_ahead(
    backend: str, jobs: int, device: str, depth: str, rules: Collection[str]
) -> None:
    if jobs < 1:
        raise InvalidInputError.for_argument("compile_jobs", jobs, "at least 1")
    command = [sys.executable, "-m", "attn_conformance.ahead", backend, "--jobs", str(jobs)]
    command += ["--device", device, "--depth", depth]
    command += [part for rule in rules for part in ("--rule", rule)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        last = ""
        for line in filter(str.strip, process.stdout or ()):
            sys.stderr.write(last)
            sys.stderr.flush()
            last = line
    if process.returncode:  # the last line says why: said once, in the error
        words = last.strip() or f"the process ended with {process.returncode}"
        raise UnsupportedOptionError(f"kernels of {backend} were not compiled ahead: {words}")
    sys.stderr.write(last)
