"""The process that a backend runs in: it may crash or hang, and the run goes on without it.

Requests come as lines of JSON on standard input, answers go as lines of JSON to what was standard
output when the process started; whatever else prints goes to standard error.
"""

from __future__ import annotations

import faulthandler
import gc
import inspect
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import torch

from attn_conformance import __version__
from attn_conformance.case import Case
from attn_conformance.rule import Depth, Rule, Violation
from attn_conformance.rules.catalogue import rules_named
from attn_conformance.subject import Subject
from attn_shared.backend import AttentionBackend
from attn_shared.dtypes import dtype_name
from attn_shared.errors import AttnError

__all__ = ["main"]

_SHOWN_FRAMES = 3  # of a traceback, the innermost


def main() -> None:
    """Serve requests until the input ends."""
    faulthandler.enable()
    answers = _private_stdout()
    server = _Server()
    for line in sys.stdin:
        json.dump(server.answer(json.loads(line)), answers)
        answers.write("\n")
        answers.flush()


def _private_stdout() -> TextIO:
    """Keep standard output for answers, and send what a library prints to standard error."""
    private = os.dup(1)
    os.dup2(2, 1)
    return os.fdopen(private, "w", encoding="utf-8")


class _Server:
    """Holds the backend and the cases between requests."""

    def __init__(self) -> None:
        self._subject: Subject | None = None
        self._cases: list[tuple[Rule, Case | None, str]] = []

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Do what is asked for."""
        if request["do"] == "run":
            return self._run(int(request["index"]))
        try:
            return self._plan(request)
        except AttnError as error:
            return {
                "kind": "error",
                "class": type(error).__name__,
                "message": error.message,
                "hint": error.hint,
            }
        except Exception as error:  # noqa: BLE001 - a backend may raise anything when it is loaded
            return {
                "kind": "error",
                "class": "PluginError",
                "message": f"{request['backend']} cannot be put to the test: {_words(error)}",
                "hint": "",
            }

    def _plan(self, request: dict[str, Any]) -> dict[str, Any]:
        rules_named(request["rules"])  # an unknown rule is told before a library is loaded
        subject = self._subject = Subject.find(request["backend"], request["device"])
        rules = rules_named(request["rules"], is_mla=subject.capability.is_mla)
        depth = Depth(request["depth"])
        entries = []
        self._cases = []
        for rule in rules:
            for case, problem in _cases(rule, depth, subject):
                entries.append(self._entry(subject, rule, case, problem))
        return {
            "kind": "plan",
            "facts": _facts(subject, depth),
            "contracts": {rule.name: rule.contract for rule in rules},
            "entries": entries,
            "compiles": _compiles(subject),
        }

    def _entry(
        self, subject: Subject, rule: Rule, case: Case | None, problem: str
    ) -> dict[str, Any]:
        reasons: list[tuple[str, str]] = []
        if case is not None:
            try:
                reasons = [(item.code, str(item)) for item in rule.excluded(subject, case)]
            except Exception as error:  # noqa: BLE001 - a capability may raise anything
                problem = f"whether it is served cannot be told: {_words(error)}"
        self._cases.append((rule, case, problem))
        return {
            "index": len(self._cases) - 1,
            "rule": rule.name,
            "case": "(cases)" if case is None else case.name,
            "words": "" if case is None else str(case),
            "reasons": reasons,
            "problem": problem,
        }

    def _run(self, index: int) -> dict[str, Any]:
        rule, case, problem = self._cases[index]
        start = time.perf_counter()
        message = problem
        if case is not None and self._subject is not None and not problem:
            message = _tried(rule.check, self._subject, case)
        seconds = time.perf_counter() - start
        is_usable = not message or _is_usable(self._subject)
        return {"kind": "outcome", "message": message, "seconds": seconds, "is_usable": is_usable}


def _cases(rule: Rule, depth: Depth, subject: Subject) -> Iterator[tuple[Case | None, str]]:
    """Yield a rule's cases; one stand-in with its problem where they cannot be made."""
    try:
        cases = rule.cases(depth, subject.capability, subject.facts)
    except Exception as error:  # noqa: BLE001 - a capability may hold anything
        yield None, f"no case can be made for this capability: {_words(error)}"
        return
    yield from ((case, "") for case in cases)


def _tried(check: Callable[[Subject, Case], None], subject: Subject, case: Case) -> str:
    """Run a case; return what is wrong, or ""."""
    torch.manual_seed(0)
    try:
        check(subject, case)
    except Violation as error:
        return str(error) or "violated"
    except Exception as error:  # noqa: BLE001 - whatever a backend raises is a failed case
        return f"raised {_words(error)}\n{_innermost(error)}"
    return ""


def _is_usable(subject: Subject | None) -> bool:
    """Whether the device still answers after a failure: some errors stay with the process."""
    gc.collect()
    if subject is None or subject.device.type == "cpu":
        return True
    try:
        torch.zeros(1, device=subject.device).item()
    except Exception:  # noqa: BLE001 - the device's own words were reported with the case
        return False
    return True


def _words(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _innermost(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)[-_SHOWN_FRAMES:]
    return "\n".join(
        f"  {_short(frame.filename)}:{frame.lineno} in {frame.name}" for frame in frames
    )


def _short(path: str) -> str:
    """Return the last three parts of a path."""
    return "/".join(Path(path).parts[-3:])


def _compiles(subject: Subject) -> bool:
    """Whether the backend's library compiles kernels at their first use; loads nothing."""
    own, default = (
        inspect.getattr_static(backend, "kernel_compiler")
        for backend in (subject.backend, AttentionBackend)
    )
    return own is not default


def _facts(subject: Subject, depth: Depth) -> dict[str, str]:
    facts = subject.facts
    dtypes = sorted(map(dtype_name, subject.capability.dtypes))
    return {
        "backend": subject.backend.name,
        "asked_for": subject.name,
        "source": subject.source,
        "device": f"{subject.device}: {facts.name} ({facts.arch})",
        "isa": " ".join(facts.isa),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "dtypes": ", ".join(dtypes),
        "depth": str(depth),
        "suite": f"attn-conformance {__version__}",
    }


if __name__ == "__main__":
    main()
