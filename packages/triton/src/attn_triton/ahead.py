"""Compile kernels before they are needed: on all cores, and for a GPU that is not there.

A kernel is compiled at its first launch, one after the other, which takes seconds. Whoever can run
a step of each kind before serving notes them and has all compiled side by side:

    compiler = TritonCompiler()
    with compiler.noting():
        run_a_step_of_each_kind()    # launches nothing: outputs are not set
    compiler.write("kernels.jsonl")
    compiler.compile(jobs=16)

What was written is compiled anywhere, without a GPU, into Triton's cache:

    python -m attn_triton.ahead kernels.jsonl --arch sm_90 --jobs 8

Another machine finds it there if Triton is the same build, the cache has the same path and
attn-triton is the same release: Triton's key covers its own files, the kernel's source with
arguments and constants, the architecture, and options; its lists of files hold absolute paths.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import importlib
import json
import os
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path

from attn_shared.errors import AttnError, InvalidInputError, VendorMissingError, own_words
from attn_triton._noting import noted_by

__all__ = ["TritonCompiler", "compile_lines", "main"]


class TritonCompiler:
    """Notes the kernels of this package's launches, and compiles them side by side.

    It is an `attn_shared.ahead.KernelCompiler`.
    """

    def __init__(self) -> None:
        self._missing: dict[str, str] = {}
        self._compiled: dict[str, None] = {}

    @contextmanager
    def noting(self) -> Iterator[Collection[str]]:
        """Note kernels instead of compiling them, and launch none of those.

        Yields what is missing, by name. Outputs of such steps are not set. Kernels that layers of
        the process have at hand already are launched and not noted: note with new layers, first.
        """
        with noted_by(self._note):
            yield self._missing.keys()

    def _note(self, line: str) -> None:
        if line not in self._compiled:
            name = json.loads(line)["kernel"].partition(":")[2]
            self._missing[f"{name} {hashlib.sha256(line.encode()).hexdigest()[:12]}"] = line

    def compile(self, jobs: int) -> None:
        """Compile what was noted for the current device, and forget it.

        Args:
            jobs: processes.

        Raises:
            VendorMissingError: a kernel does not compile, in the compiler's own words.
        """
        lines = list(self._missing.values())
        self._missing.clear()
        problems = compile_lines(lines, jobs=jobs)
        if problems:
            raise VendorMissingError("; ".join(problems), library="triton")
        self._compiled.update(dict.fromkeys(lines))

    def write(self, path: str | Path) -> int:
        """Write all that was noted so far, a kernel a line, and return how many that are."""
        lines = [*self._compiled, *self._missing.values()]
        Path(path).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        return len(lines)


def compile_lines(
    lines: Sequence[str], *, arch: str | None = None, jobs: int | None = None
) -> list[str]:
    """Compile kernels into Triton's cache, and return what went wrong.

    Args:
        lines: of kernels, as `TritonCompiler.write` writes them.
        arch: such as "sm_90" or "gfx942"; None: that of the current device, for which the C code
            that launches each kernel is compiled as well (Triton 3.6; it needs the driver).
        jobs: processes; by default as many as there are cores.

    Raises:
        InvalidInputError: jobs is below 1.
    """
    if jobs is not None and jobs < 1:
        raise InvalidInputError.for_argument("jobs", jobs, "at least 1")
    if not lines:
        return []
    compile_one = functools.partial(_problem, arch=arch or _current_arch(), is_here=arch is None)
    context = get_context("spawn")
    with ProcessPoolExecutor(jobs or os.cpu_count(), context) as pool:
        found = pool.map(compile_one, lines)
        return [problem for problem in found if problem]


def _current_arch() -> str:
    from attn_triton.kernels.compiling import current_arch

    return current_arch()


def _problem(line: str, arch: str, is_here: bool) -> str:
    """Compile a kernel; return why that failed, or ""."""
    name = f"line {line[:40]!r}"
    try:
        from attn_triton.kernels.compiling import Kind, compile_kernel, make_launcher, target_of

        parts = json.loads(line)
        module, _, name = parts["kernel"].partition(":")
        kernel = getattr(importlib.import_module(module), name)
        kinds = {key: Kind(*kind) for key, kind in parts["kinds"].items()}
        target, options = target_of(arch), parts["options"]
        made = compile_kernel(kernel, kinds, parts["constants"], target=target, options=options)
        if is_here:
            make_launcher(made)
    except Exception as error:  # noqa: BLE001  whatever the compiler says is the result
        return f"{name} for {arch}: {own_words(error)}"
    return ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile by the command line; 1 where a kernel does not compile, 2 where none could be."""
    parser = argparse.ArgumentParser(
        prog="python -m attn_triton.ahead", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("kernels", type=Path, help="what TritonCompiler.write wrote")
    parser.add_argument("--arch", help="such as sm_90; by default the device that is here")
    parser.add_argument("--jobs", type=int, help="processes; by default one a core")
    options = parser.parse_args(arguments)
    start = time.monotonic()
    try:
        lines = options.kernels.read_text(encoding="utf-8").splitlines()
        problems = compile_lines(lines, arch=options.arch, jobs=options.jobs)
    except (AttnError, ImportError, OSError, UnicodeError) as error:
        sys.stderr.write(f"Error: {own_words(error)}\n")
        return 2
    seconds = time.monotonic() - start
    words = [f"{len(lines) - len(problems)} of {len(lines)} kernels in {seconds:.0f} s", *problems]
    sys.stdout.write("\n".join(words) + "\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
