"""The root conftest: tests of missing hardware are skipped, counted, or an error when so told."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest_plugins = ["pytester"]

ROOT = Path(__file__).resolve().parents[1]
MODULE = """
import pytest

def test_plain():
    pass

@pytest.mark.cuda
def test_any_gpu():
    pass

@pytest.mark.cuda(min_capability=(9, 0))
def test_hopper():
    pass
"""


@pytest.fixture
def checkout(pytester: pytest.Pytester) -> pytest.Pytester:
    """A folder with the repository's conftest and one test module in platforms/cuda."""
    pytester.makeconftest((ROOT / "conftest.py").read_text(encoding="utf-8"))
    pytester.makeini("[pytest]\nmarkers =\n    cuda\n    rocm\n    xpu\n    interpreter\n")
    folder = pytester.mkdir("platforms") / "cuda"
    folder.mkdir()
    (folder / "test_sample.py").write_text(MODULE, encoding="utf-8")
    return pytester


def pretend_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None) -> None:
    """Make torch answer as on a machine with one NVIDIA GPU of this capability, or with none."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)


def last_line(result: pytest.RunResult) -> str:
    return next(line for line in reversed(result.outlines) if line.strip())


def test_missing_hardware_is_counted_with_its_reason(
    checkout: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpu(monkeypatch, None)
    result = checkout.runpytest_inprocess("platforms")
    result.assert_outcomes(passed=1, skipped=2)
    reason = "cuda: torch sees no NVIDIA GPU"
    assert last_line(result) == f"1 passed, 2 not run on this machine: {reason}"


def test_too_low_a_capability_is_counted_with_both_values(
    checkout: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpu(monkeypatch, (8, 9))
    result = checkout.runpytest_inprocess("platforms")
    result.assert_outcomes(passed=2, skipped=1)
    reason = "cuda: capability 8.9 is below 9.0"
    assert last_line(result) == f"2 passed, 1 not run on this machine: {reason}"


def test_reasons_are_counted_apart_hardware_by_name(
    checkout: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpu(monkeypatch, (8, 9))
    checkout.makepyfile(
        "import pytest\n@pytest.mark.skip(reason='of its own')\ndef test_odd(): ...",
    )
    result = checkout.runpytest_inprocess()
    reasons = "1 for cuda: capability 8.9 is below 9.0; 1 for other reasons, listed above"
    assert last_line(result) == f"2 passed, 2 not run on this machine: {reasons}"


def test_present_hardware_leaves_nothing_out(
    checkout: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpu(monkeypatch, (9, 0))
    result = checkout.runpytest_inprocess("platforms")
    result.assert_outcomes(passed=3)
    assert last_line(result) == "3 passed, none left out on this machine"


def test_required_hardware_that_is_missing_is_an_error(
    checkout: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpu(monkeypatch, None)
    result = checkout.runpytest_inprocess("platforms", "--require-hardware")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert (
        "--require-hardware: cuda: torch sees no NVIDIA GPU"
        in result.stderr.str() + result.stdout.str()
    )


def test_required_hardware_of_a_room_is_asked_for_even_if_no_test_needs_it(
    checkout: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpu(monkeypatch, (9, 0))
    options = ("--room=rocm", "--require-hardware")
    result = checkout.runpytest_inprocess("platforms", *options)
    assert result.ret == pytest.ExitCode.USAGE_ERROR


def test_a_room_keeps_its_own_tests_and_what_its_marker_names_elsewhere(
    checkout: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpu(monkeypatch, (9, 0))
    checkout.makepyfile(test_elsewhere=MODULE)
    result = checkout.runpytest_inprocess("--room=cuda")
    result.assert_outcomes(passed=5, deselected=1)
