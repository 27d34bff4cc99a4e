"""Hearing a library say that it took a slow path.

Some libraries have no kernel for a shape and compute it another way, many times slower; all that
tells is a warning, a log line or a line on stderr, while the first call runs. Such a time is
nobody's, so that it is refused. What a library's C++ writes to the file descriptor itself is not
heard here.
"""

from __future__ import annotations

import logging
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TextIO, cast

import torch

from attn_shared.errors import UnsupportedOptionError

__all__ = ["SlowPathError", "SlowPathGuard"]

_SLOW_WORDS = re.compile(
    r"fall(?:s|ing|en)?[ -]?back|not compiled|no kernel (?:for|found)"
    r"|using (?:a |the )?(?:slow|slower|reference|naive)\b",
    re.IGNORECASE,
)

_LONGEST = 200  # characters of a warning that are kept


class SlowPathError(UnsupportedOptionError):
    """A library took a slow path that its caller did not ask for."""


class SlowPathGuard:
    """Listens while contenders run for the first time.

    A library may say it once per process, whatever else takes the slow path later: a contender
    that was refused for a log line or a line on stderr stays refused.
    """

    def __init__(self) -> None:
        """Start with nothing heard."""
        self._refused: dict[str, str] = {}

    @contextmanager
    def listen(self, name: str) -> Iterator[list[str]]:
        """Refuse to time a contender whose library says in here that it is slow.

        Yields:
            A list that holds, at the end, what was warned of otherwise.

        Raises:
            SlowPathError: with the library's own words.
        """
        if name in self._refused:
            raise SlowPathError(
                f"{name} is not timed: its library took a slow path earlier in this process, and "
                f"may say so only once ({self._refused[name]!r}).",
                hint="measure this workload in a run of its own.",
            )
        warned: list[str] = []
        said: list[str] = []
        harmless: list[str] = []
        with _heard(warned, said):
            yield harmless
        slow_once = [words for words in said if _SLOW_WORDS.search(words)]
        if slow_once:
            self._refused[name] = slow_once[0]
        slow = slow_once + [words for words in warned if _SLOW_WORDS.search(words)]
        if slow:
            raise SlowPathError(f"{name} is not timed: its library took a slow path ({slow[0]!r}).")
        harmless += dict.fromkeys(f"{name} warned: {words[:_LONGEST]}" for words in warned)


@contextmanager
def _heard(warned: list[str], said: list[str]) -> Iterator[None]:
    """Collect warnings, and what is logged or written to stderr, which still appears there."""
    listener = _Listener(said)
    loggers = [logging.getLogger(), *_silent_loggers()]
    was_always = torch.is_warn_always_enabled()
    with ExitStack() as stack:
        caught = stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        torch.set_warn_always(True)
        stack.callback(torch.set_warn_always, was_always)
        stack.callback(setattr, sys, "stderr", sys.stderr)
        sys.stderr = cast("TextIO", _Echo(sys.stderr, said))
        for logger in loggers:
            logger.addHandler(listener)
            stack.callback(logger.removeHandler, listener)
        yield
    warned += [" ".join(str(warning.message).split()) for warning in caught]


def _silent_loggers() -> list[logging.Logger]:
    """Return the loggers that hand nothing on to the root."""
    known = logging.Logger.manager.loggerDict.values()
    return [item for item in known if isinstance(item, logging.Logger) and not item.propagate]


class _Listener(logging.Handler):
    def __init__(self, said: list[str]) -> None:
        super().__init__(level=logging.INFO)
        self._said = said

    def emit(self, record: logging.LogRecord) -> None:
        self._said.append(record.getMessage())


class _Echo:
    """Standard error that is also listened to."""

    def __init__(self, stream: TextIO, said: list[str]) -> None:
        self._stream = stream
        self._said = said

    def write(self, text: str) -> int:
        if text.strip():
            self._said.append(text.strip())
        return self._stream.write(text)

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)
