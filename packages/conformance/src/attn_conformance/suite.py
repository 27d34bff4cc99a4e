"""Runs cases in a process of their own, and outlives what they do to it."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from attn_conformance.outcome import Depth, Entry, Outcome, Plan, Status
from attn_shared import errors

__all__ = ["DEFAULT_TIMEOUT_S", "Suite"]

DEFAULT_TIMEOUT_S = 120.0
"""Seconds that one case may take: enough for a kernel to be compiled."""

_START_TIMEOUT_S = 300.0  # for importing torch and a vendor's library, and planning
_LAST_LINES = 12  # of a dead process's standard error
_MOST_HANGS = 3  # of one rule, before its other cases are given up


class Suite:
    """The cases of one backend on one device, run one at a time.

        with Suite("TORCH_SDPA") as suite:
            outcomes = [suite.run(entry) for entry in suite.plan.entries]

    Attributes:
        plan: what there is to run.
    """

    def __init__(
        self,
        backend: str,
        *,
        depth: str = "quick",
        device: str = "cpu",
        rules: Collection[str] = (),
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        """Start the process and plan.

        Args:
            backend: a registered name, or "module:Class".
            depth: "quick" or "full".
            device: a torch device of this machine.
            rules: names of rules to run; all of them by default.
            timeout_s: seconds that one case may take.

        Raises:
            AttnError: backend, device, depth or rule is unknown, or the backend does not load.
        """
        if depth not in list(Depth):
            raise errors.UnknownNameError.for_name("depth", depth, map(str, Depth))
        if not timeout_s > 0:
            raise errors.InvalidInputError.for_argument("timeout_s", timeout_s, "a number > 0")
        self._request: dict[str, Any] = {
            "do": "plan",
            "backend": backend,
            "device": device,
            "depth": depth,
            "rules": list(rules),
        }
        self._timeout_s = timeout_s
        self._process: _Process | None = None
        self._compiles = False
        self._hangs: Counter[str] = Counter()
        self.plan = self._start()

    def __enter__(self) -> Suite:
        """Return the suite."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the process."""
        self.close()

    def close(self) -> None:
        """End the process; nothing happens if there is none."""
        if self._process is not None:
            self._process.end()
            self._process = None

    def run(self, entry: Entry) -> Outcome:
        """Run one case, or say why it is excluded.

        A process that hangs past the time limit or dies is a failed case; the next case gets a
        new one. Where several cases of a rule hang, its others fail without being tried.
        """
        if entry.is_excluded:
            sentences = "; ".join(text for _, text in entry.reasons)
            return _outcome(entry, Status.EXCLUDED, sentences)
        if self._hangs[entry.rule] >= _MOST_HANGS:
            words = f"not tried: {_MOST_HANGS} cases of this rule hung before"
            return _outcome(entry, Status.FAILED, words)
        try:
            answer = self._living().ask({"do": "run", "index": entry.index}, self._timeout_s)
        except _HangError:
            self.close()
            self._hangs[entry.rule] += 1
            words = f"no answer within {self._timeout_s:g} s: the process was ended"
            if self._compiles:
                words += "; a kernel compiled at first use counts (--compile-jobs N: before)"
            return _outcome(entry, Status.FAILED, words, self._timeout_s)
        except _DeathError as error:
            self.close()
            return _outcome(entry, Status.FAILED, f"the process died: {error}")
        if not answer["is_usable"]:
            self.close()
        status = Status.FAILED if answer["message"] else Status.PASSED
        return _outcome(entry, status, answer["message"], answer["seconds"])

    def _living(self) -> _Process:
        if self._process is None:
            self._start()
        if self._process is None:
            raise TypeError("a started suite has a process")
        return self._process

    def _start(self) -> Plan:
        self._process = process = _Process()
        try:
            answer = process.ask(self._request, _START_TIMEOUT_S)
        except (_HangError, _DeathError) as error:
            self.close()
            words = str(error) or f"no answer within {_START_TIMEOUT_S:g} s"
            message = f"{self._request['backend']} ended the process that loaded it: {words}"
            raise errors.PluginError(message) from error
        if answer["kind"] == "error":
            self.close()
            raise _as_error(answer)
        self._compiles = bool(answer["compiles"])
        return Plan(
            facts=answer["facts"],
            contracts=answer["contracts"],
            entries=tuple(map(Entry.from_dict, answer["entries"])),
            has_all_rules=not self._request["rules"],
        )


def _outcome(entry: Entry, status: Status, message: str = "", seconds: float = 0.0) -> Outcome:
    return Outcome(
        rule=entry.rule, case=entry.case, status=status, message=message, seconds=seconds
    )


def _as_error(answer: dict[str, Any]) -> errors.AttnError:
    """Return the error of another process as the same class of this one."""
    kind = getattr(errors, answer["class"], errors.PluginError)
    error = kind(answer["message"], hint=answer["hint"])
    return error if isinstance(error, errors.AttnError) else errors.PluginError(answer["message"])


class _HangError(Exception):
    """No answer came in time."""


class _DeathError(Exception):
    """The process ended without an answer; holds its last words."""


class _Process:
    """One worker process, and the thread that reads its answers."""

    def __init__(self) -> None:
        # An interpreter of its own, and not a fork or a spawn of this one: this program's main
        # module need not be importable, and a parent that uses a GPU must not be forked.
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `end`
        self._popen = subprocess.Popen(
            [sys.executable, "-m", "attn_conformance.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            encoding="utf-8",
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        self._answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def ask(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Send a request and wait for its answer."""
        if self._popen.stdin is None:
            raise TypeError("the process was started with a pipe")
        try:
            self._popen.stdin.write(json.dumps(request) + "\n")
            self._popen.stdin.flush()
            line = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            raise _HangError from None
        except OSError as error:
            raise _DeathError(self._last_words()) from error
        if line is None:
            raise _DeathError(self._last_words())
        answer: dict[str, Any] = json.loads(line)
        return answer

    def end(self) -> None:
        """Kill the process and what it has started, a compiler for instance; wait for it."""
        started = list(_descendants(self._popen.pid))
        self._popen.kill()
        for pid in started:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._popen.wait()
        self._reader.join()
        for pipe in (self._popen.stdin, self._popen.stdout):
            if pipe is not None:
                _close(pipe)
        self._stderr.close()

    def _read(self) -> None:
        if self._popen.stdout is not None:
            for line in self._popen.stdout:
                self._answers.put(line)
        self._answers.put(None)

    def _last_words(self) -> str:
        code = self._popen.wait()
        self._stderr.seek(0)
        text = self._stderr.read().decode("utf-8", "replace").strip()
        return "\n".join([_words_of(code), *_last_lines(text)])


def _descendants(pid: int) -> Iterator[int]:
    """Yield what a process has started, and so on, where the system lists it (Linux)."""
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in map(int, listed.read_text().split()):
                yield child
                yield from _descendants(child)


def _last_lines(text: str) -> list[str]:
    """Return the last lines; of a crash's report, its beginning."""
    crash = text.rfind("Fatal Python error")
    if crash >= 0:
        return text[crash:].splitlines()[:_LAST_LINES]
    return text.splitlines()[-_LAST_LINES:]


def _close(pipe: IO[str]) -> None:
    """Close a pipe; what was buffered for a process that is gone is lost."""
    try:
        pipe.close()
    except OSError:
        return


def _words_of(code: int) -> str:
    """Say how a process ended: "signal SIGSEGV", "exit code 3"."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"
