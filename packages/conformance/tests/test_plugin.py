from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def run_pytest(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run pytest in an empty folder, where the tests' backends can be imported."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    code = f"import sys; sys.path.insert(0, {str(HERE)!r})"
    (tmp_path / "conftest.py").write_text(code, encoding="utf-8")
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)


def suite(tmp_path: Path, backend: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    name = f"conformance_backends:{backend}"
    words = ("--pyargs", "attn_conformance", "--rootdir", ".", "-c", "conftest.ini")
    (tmp_path / "conftest.ini").write_text("[pytest]\n", encoding="utf-8")
    path = f"{HERE}"
    return run_pytest(
        tmp_path, "-o", f"pythonpath={path}", *words, "--attn-backend", name, *arguments
    )


def test_a_case_is_a_test_and_the_summary_counts(tmp_path: Path) -> None:
    done = suite(tmp_path, "Picky", "--attn-rule", "causal", "-v")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "catalogue.py::causal[decode] PASSED" in done.stdout
    assert "attn backend: PICKY" in done.stdout
    assert "PICKY: keeps the contract" in done.stdout


def test_a_failed_case_shows_the_rule_and_the_case_and_no_traceback(tmp_path: Path) -> None:
    done = suite(tmp_path, "Picky", "--attn-rule", "construction")
    assert done.returncode == 1
    assert "FAILED" in done.stdout
    assert "the constructor raises ValueError: no softcap here" in done.stdout
    assert "rule: What the capability serves, the constructors accept" in done.stdout
    assert "case: Case(name='softcap'" in done.stdout
    assert "Traceback" not in done.stdout


def test_expected_failures_pass_and_unexpected_passes_fail(tmp_path: Path) -> None:
    known = tmp_path / "known.txt"
    arguments = ("--attn-rule", "construction", "--attn-xfails", str(known))
    known.write_text("construction[softcap]: comes later\n", encoding="utf-8")
    done = suite(tmp_path, "Picky", *arguments)
    assert done.returncode == 0, done.stdout
    assert "1 xfailed" in done.stdout
    known.write_text("construction[s*]: comes later\n", encoding="utf-8")
    done = suite(tmp_path, "Picky", *arguments)
    assert done.returncode == 1
    assert "XPASS(strict)" in done.stdout


def test_a_stale_line_fails_a_run_whose_cases_pass(tmp_path: Path) -> None:
    known = tmp_path / "known.txt"
    known.write_text("causal[nothing]: gone\n", encoding="utf-8")
    done = suite(tmp_path, "Picky", "--attn-rule", "causal", "--attn-xfails", str(known))
    assert done.returncode == 1
    assert "causal[nothing] matches no case" in done.stdout


def test_a_part_of_the_cases_is_not_judged_as_a_whole(tmp_path: Path) -> None:
    known = tmp_path / "known.txt"
    known.write_text("causal[mixed]: gone\n", encoding="utf-8")
    arguments = ("--attn-rule", "causal", "--attn-xfails", str(known), "-k", "decode")
    done = suite(tmp_path, "Picky", *arguments)
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--attn-rule", "no_such"), "unknown rule 'no_such'"),
        (("--attn-device", "tin"), "unknown device 'tin'"),
        (("--attn-xfails", "missing.txt"), "missing.txt"),
    ],
)
def test_a_usage_error_is_told_as_one(
    tmp_path: Path, arguments: tuple[str, ...], words: str
) -> None:
    done = suite(tmp_path, "Picky", *arguments)
    assert done.returncode == 4
    assert words in done.stdout + done.stderr


def test_without_a_backend_the_plugin_does_nothing(tmp_path: Path) -> None:
    (tmp_path / "test_plain.py").write_text("def test_plain():\n    pass\n", encoding="utf-8")
    done = run_pytest(tmp_path, "-q")
    assert done.returncode == 0, done.stdout
    assert "attn" not in done.stdout


def test_the_plugin_imports_nothing_heavy() -> None:
    code = (
        "import sys; before = set(sys.modules); import attn_conformance.plugin; "
        "print([m for m in set(sys.modules) - before if m.split('.')[0] in "
        "('torch', 'hypothesis', 'rich', 'attn_shared')])"
    )
    code = f"import pytest, sys; {code}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
