from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable

import pytest
import torch

from attn_bench.slow_paths import SlowPathError, SlowPathGuard

WORDS = "no kernel for head size 72: falling back to the reference"


def _warns() -> None:
    warnings.warn(WORDS, UserWarning, stacklevel=2)


def _logs() -> None:
    logging.getLogger("a_vendor").warning(WORDS)


def _logs_in_silence() -> None:
    logging.getLogger("a_silent_vendor").warning(WORDS)


def _writes() -> None:
    sys.stderr.write(f"{WORDS}\n")


@pytest.fixture(autouse=True)
def _silent_logger() -> None:
    logging.getLogger("a_silent_vendor").propagate = False


@pytest.mark.parametrize("say", [_warns, _logs, _logs_in_silence, _writes])
def test_a_library_that_says_so_is_not_timed(say: Callable[[], None]) -> None:
    with (
        pytest.raises(SlowPathError, match=r"FAKE is not timed.*no kernel for head size 72"),
        SlowPathGuard().listen("FAKE"),
    ):
        say()


@pytest.mark.parametrize(
    ("say", "is_sticky"),
    [(_warns, False), (_logs, True), (_logs_in_silence, True), (_writes, True)],
)
def test_what_may_be_said_once_only_stays_refused(say: Callable[[], None], is_sticky: bool) -> None:
    guard = SlowPathGuard()
    with pytest.raises(SlowPathError), guard.listen("FAKE"):
        say()
    with guard.listen("OTHER"):
        pass
    if is_sticky:
        with pytest.raises(SlowPathError, match="earlier in this process"), guard.listen("FAKE"):
            pass
    else:
        with guard.listen("FAKE"):
            pass


def test_a_warning_that_python_shows_once_is_heard_each_time() -> None:
    guard = SlowPathGuard()
    for _ in range(2):
        with pytest.raises(SlowPathError), guard.listen("FAKE"):
            _warns()


def test_other_words_are_no_slow_path_and_warnings_are_kept() -> None:
    with SlowPathGuard().listen("FAKE") as notes:
        sys.stderr.write("compiling\n")
        logging.getLogger("a_vendor").warning("loaded 3 kernels")
        for _ in range(2):
            warnings.warn("a deprecated\n argument", UserWarning, stacklevel=1)
    assert notes == ["FAKE warned: a deprecated argument"]


def test_stderr_still_gets_everything(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SlowPathError), SlowPathGuard().listen("FAKE"):
        _writes()
    assert capsys.readouterr().err == f"{WORDS}\n"


def test_everything_is_put_back_even_after_an_error() -> None:
    before = (sys.stderr, torch.is_warn_always_enabled(), list(logging.getLogger().handlers))
    with pytest.raises(ZeroDivisionError), SlowPathGuard().listen("FAKE"):
        raise ZeroDivisionError
    after = (sys.stderr, torch.is_warn_always_enabled(), list(logging.getLogger().handlers))
    assert after == before
