"""Compile what the cases of a suite need, before the suite: `attn verify NAME --compile-jobs N`.

A library that compiles its kernels at their first use does so one after the other within cases,
each of which may then take longer than a case has. Here the cases are run without compiling, to see
what is missing, and all of that is compiled side by side; again, until nothing is missing.

    python -m attn_conformance.ahead NAME --device cuda --jobs 8
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Collection, Sequence

from attn_conformance.checks import unheld
from attn_conformance.rule import Depth
from attn_conformance.stubs.suite import run_rules
from attn_conformance.subject import Subject
from attn_shared.errors import AttnError, UnsupportedOptionError

__all__ = ["compile_needed", "main"]

_MOST_PASSES = 8  # a call finds a handful of modules missing, one after the other


def compile_needed(
    subject: Subject,
    jobs: int,
    rules: Collection[str] = (),
    depth: Depth = Depth.QUICK,
    say: Callable[[str], None] | None = None,
) -> int:
    """Compile what the cases need, and return how many modules that were.

    Args:
        subject: the backend on its device.
        jobs: files that are compiled side by side.
        rules: names of rules; all of them by default.
        depth: how many cases.
        say: told what is compiled, and how long it took; by default standard output is.

    Raises:
        UnsupportedOptionError: the backend compiles nothing ahead, or does not come to an end.
        VendorMissingError: a module does not compile, in the compiler's own words.
    """
    say = say or _say
    compiler = subject.backend.kernel_compiler()
    if compiler is None:
        raise UnsupportedOptionError(
            f"compile_jobs={jobs} is not served by {subject.name}, which compiles nothing ahead.",
            hint="leave it out.",
        )
    total = 0
    for _ in range(_MOST_PASSES):
        with compiler.noting() as missing, unheld():
            for _outcome in run_rules(subject, rules, depth):
                pass  # what fails fails in the suite, which says so
            names = sorted(missing)
        if not names:
            return total
        total += len(names)
        say(f"{subject.name}: compiling {len(names)} modules, {jobs} files at a time")
        start = time.monotonic()
        compiler.compile(jobs)
        say("\n".join([f"{time.monotonic() - start:.0f} s:", *names]))
    raise UnsupportedOptionError(
        f"{subject.name} still lacks modules after {_MOST_PASSES} passes.",
        hint="run the suite, which says which cases fail.",
    )


def _say(words: str) -> None:
    sys.stdout.write(f"{words}\n")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile by the command line; 2 where it fails."""
    parser = argparse.ArgumentParser(prog="attn_conformance.ahead", description=__doc__)
    parser.add_argument("backend", help="a registered name, or module:Class")
    parser.add_argument("--device", default="cuda", help="a torch device of this machine")
    parser.add_argument("--jobs", type=int, required=True, help="files compiled side by side")
    parser.add_argument("--depth", default="quick", choices=[depth.value for depth in Depth])
    parser.add_argument("--rule", action="append", default=[], help="this rule alone; repeatable")
    options = parser.parse_args(arguments)
    try:
        subject = Subject.find(options.backend, options.device)
        count = compile_needed(subject, options.jobs, options.rule, Depth(options.depth))
    except AttnError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    _say(f"{options.backend}: {count} modules were compiled, none is missing")
    return 0


if __name__ == "__main__":
    sys.exit(main())
