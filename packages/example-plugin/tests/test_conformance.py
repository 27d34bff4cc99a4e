"""The suite on EXAMPLE_EAGER, as its author runs it: by name, with the shipped list."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import resources
from pathlib import Path

from attn_conformance.expected_failures import ExpectedFailures
from attn_conformance.verify import verify

EXPECTED_FAILURES = Path(
    str(resources.files("attn_example_plugin").joinpath("expected_failures.txt"))
)


def test_the_suite_passes_under_pytest(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "--pyargs", "attn_conformance"]
    command += ["-p", "no:cacheprovider", "--attn-backend", "EXAMPLE_EAGER"]
    command += ["--attn-xfails", str(EXPECTED_FAILURES)]
    environment = {**os.environ, "COLUMNS": "200"}

    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "attn backend: EXAMPLE_EAGER from attn-example-plugin 0.1.0" in done.stdout
    assert "EXAMPLE_EAGER: keeps the contract" in done.stdout


def test_verify_counts_what_the_capability_leaves_out() -> None:
    report = verify("EXAMPLE_EAGER", rules=["causal", "sinks"])

    causal, sinks = report.rules
    assert report.ok
    assert (causal.failed, sinks.run) == (0, 0)
    assert causal.run > 0
    assert any("sink=True" in reason for reason, _ in sinks.reasons)


def test_no_failure_is_expected() -> None:
    assert ExpectedFailures.read(EXPECTED_FAILURES).lines == ()
