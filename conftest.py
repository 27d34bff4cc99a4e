"""What all tests of the repository share: hardware markers, what was not run, Hypothesis profiles.

A test marked `cuda`, `rocm` or `xpu` is skipped, with the reason, where that hardware is missing;
`@pytest.mark.cuda(min_capability=(9, 0))` also asks for a capability. One marked `interpreter`
needs Triton's interpreter, which the session `triton` has. The last line of a run counts what was
not run and why. `--room=cuda` runs a platform's own tests and what its marker names elsewhere;
`--require-hardware` makes missing hardware an error.
"""

from __future__ import annotations

import importlib.util
import os
from collections import Counter
from collections.abc import Callable, Generator
from functools import cache
from pathlib import Path

import pytest

__all__: list[str] = []

ROOT = Path(__file__).resolve().parent


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the two options of the platforms' sessions."""
    group = parser.getgroup("hardware")
    group.addoption("--room", choices=ROOMS, help="the platform whose tests are run")
    group.addoption(
        "--require-hardware",
        action="store_true",
        help="fail at once if the room's hardware, or that of a selected test, is missing",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Make property tests repeatable where CI runs them; none has a deadline anywhere."""
    if importlib.util.find_spec("hypothesis") is None:
        return
    from hypothesis import settings

    settings.register_profile("ci", deadline=None, derandomize=True, database=None)
    settings.register_profile("local", deadline=None)
    settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep what the room asks for, refuse missing hardware if told so, and skip the rest of it."""
    room = config.getoption("room")
    if room is not None:
        _deselect_other_rooms(config, items, room)
    if config.getoption("require_hardware"):
        _require_hardware(items, room)
    for item in items:
        reason = _reason_not_to_run(item)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(
    session: pytest.Session, exitstatus: int | pytest.ExitCode
) -> Generator[None, object, object]:
    """Below pytest's closing line, count what passed and what this machine could not run."""
    result = yield
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    did_run = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
    if did_run and reporter is not None and not session.config.option.collectonly:
        reporter.write_line(_closing_line(reporter.stats))
    return result


def _closing_line(stats: dict[str, list[pytest.TestReport]]) -> str:
    passed = f"{len(stats.get('passed', []))} passed"
    if failed := len(stats.get("failed", [])) + len(stats.get("error", [])):
        passed += f", {failed} failed"
    reasons = Counter(_short_reason(report) for report in stats.get("skipped", []))
    if not reasons:
        return f"{passed}, none left out on this machine"
    detail = "; ".join(f"{count} for {reason}" for reason, count in reasons.most_common())
    if len(reasons) == 1:
        detail = next(iter(reasons))
    return f"{passed}, {reasons.total()} not run on this machine: {detail}"


def _short_reason(report: pytest.TestReport) -> str:
    # A skip's longrepr is (path, line, "Skipped: reason").
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    reason = text.removeprefix("Skipped: ")
    return reason if reason.split(":")[0] in MISSING else "other reasons, listed above"


def _deselect_other_rooms(config: pytest.Config, items: list[pytest.Item], room: str) -> None:
    own = ROOT / "platforms" / room
    kept = [item for item in items if own in item.path.parents or item.get_closest_marker(room)]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


def _require_hardware(items: list[pytest.Item], room: str | None) -> None:
    used = {name for name in MISSING for item in items if item.get_closest_marker(name)}
    reasons = [MISSING[name]() for name in sorted(used | ({room} if room else set()))]
    missing = [reason for reason in reasons if reason is not None]
    if missing:
        raise pytest.UsageError(f"--require-hardware: {'; '.join(missing)}")


def _reason_not_to_run(item: pytest.Item) -> str | None:
    for name, missing in MISSING.items():
        for marker in item.iter_markers(name):
            reason = missing() or _capability_reason(name, marker.kwargs.get("min_capability"))
            if reason is not None:
                return reason
    return None


def _capability_reason(name: str, wanted: tuple[int, int] | None) -> str | None:
    if wanted is None:
        return None
    import torch

    found = torch.cuda.get_device_capability()
    if found >= wanted:
        return None
    return f"{name}: capability {found[0]}.{found[1]} is below {wanted[0]}.{wanted[1]}"


@cache
def _cuda_missing() -> str | None:
    import torch

    if torch.version.cuda is None:
        return f"cuda: no NVIDIA GPU (torch {torch.__version__} is built without CUDA)"
    return None if torch.cuda.is_available() else "cuda: torch sees no NVIDIA GPU"


@cache
def _rocm_missing() -> str | None:
    import torch

    if torch.version.hip is None:
        return f"rocm: no AMD GPU (torch {torch.__version__} is built without ROCm)"
    return None if torch.cuda.is_available() else "rocm: torch sees no AMD GPU"


@cache
def _xpu_missing() -> str | None:
    import torch

    if torch.version.xpu is None:
        return f"xpu: no Intel GPU (torch {torch.__version__} is built without XPU)"
    return None if torch.xpu.is_available() else "xpu: torch sees no Intel GPU"


@cache
def _interpreter_missing() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "interpreter: Triton is not installed here, as it is in the session triton"
    if os.environ.get("TRITON_INTERPRET") != "1":
        return "interpreter: TRITON_INTERPRET is not 1, as it is in the session triton"
    return None


ROOMS = ("cuda", "rocm", "xpu")
"""The platforms with hardware of their own."""

MISSING: dict[str, Callable[[], str | None]] = {
    "cuda": _cuda_missing,
    "rocm": _rocm_missing,
    "xpu": _xpu_missing,
    "interpreter": _interpreter_missing,
}
"""For each marker, why what it needs cannot be used here, or None."""
