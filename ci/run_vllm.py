"""Let vLLM's engine run a small model on attn's backends, and compare with its own.

    python ci/run_vllm.py --engine PYTHON --results FOLDER

PYTHON is the interpreter of an environment with vLLM and attn-vllm; this one has attn-transformers
and the demo's model. In float32 the texts must be equal, and attn's backend must have run every
layer of every step. What attn refuses must end vLLM's start-up with the reasons. The session
`vllm` calls this; its last lines are the comparison.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from repository import ROOT

__all__ = ["Refusal", "Run", "main"]


@dataclass(frozen=True)
class Run:
    """One start of the engine: whose backend (None: vLLM's own), and in which dtype."""

    backend: str | None
    dtype: str

    @property
    def title(self) -> str:
        """What the table calls it."""
        return f"attn, {self.backend}" if self.backend else "vLLM's own"


@dataclass(frozen=True)
class Refusal:
    """A start that must fail: the environment, the engine's options, and words of the error."""

    backend: str
    options: tuple[str, ...]
    words: tuple[str, ...]


RUNS = tuple(
    Run(backend, dtype)
    for dtype in ("float32", "bfloat16")
    for backend in (None, "auto", "TORCH_SDPA")
)

REFUSALS = (
    Refusal("NO_SUCH_BACKEND", (), ("NO_SUCH_BACKEND", "allowed")),
    Refusal("FLASH_ATTN", (), ("FLASH_ATTN",)),
    Refusal(
        "TORCH_SDPA",
        ("--kv-cache-dtype", "int4_per_token_head"),
        ("TORCH_SDPA", "int4_per_token_head"),
    ),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all, print the comparison, and say whether it holds."""
    options = parsed(arguments)
    options.results.mkdir(parents=True, exist_ok=True)
    model = model_folder()
    results = {}
    for run in RUNS:
        print(f"run_vllm: {run.title}, {run.dtype}", flush=True)
        results[run] = generated(options, model, run)
    problems = [problem for run in RUNS for problem in problems_of(run, results)]
    problems += [problem for refusal in REFUSALS for problem in started(options, model, refusal)]
    print(table(results))
    print("\n".join(problems) or "equal texts in float32, run by attn; bad choices were refused")
    return int(bool(problems))


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--engine", required=True, help="the interpreter that has vLLM")
    parser.add_argument("--results", type=Path, required=True, help="a folder")
    return parser.parse_args(arguments)


def model_folder() -> Path:
    """Return the demo's model as safetensors, converted if it was not."""
    from attn_shared.settings import from_environ
    from attn_transformers.demo_model import cache_folder, ensure_model, find_gguf

    cache = cache_folder(from_environ())
    return ensure_model(find_gguf(), cache, lambda *_progress: None).folder


def environment(backend: str | None) -> Mapping[str, str]:
    """The engine's environment: OpenMP that waits without spinning, and no downloads."""
    variables = {**os.environ, "OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1"}
    variables.pop("ATTN_VLLM_BACKEND", None)
    return variables if backend is None else {**variables, "ATTN_VLLM_BACKEND": backend}


def start(
    options: argparse.Namespace, model: Path, backend: str | None, *more: str
) -> subprocess.CompletedProcess[str]:
    """Start the engine in a process of its own."""
    script = str(ROOT / "ci" / "vllm_engine.py")
    command = [options.engine, script, "--model", str(model), *more]
    return subprocess.run(
        command,
        env=environment(backend),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )


def generated(options: argparse.Namespace, model: Path, run: Run) -> dict[str, Any]:
    """Return what the engine wrote.

    Raises:
        SystemExit: it failed; shows its last lines.
    """
    output = options.results / f"{run.backend or 'own'}-{run.dtype}.json"
    output.unlink(missing_ok=True)
    more = ("--dtype", run.dtype, "--output", str(output))
    done = start(options, model, run.backend, *more)
    if done.returncode or not output.is_file():
        print(done.stdout[-6000:])
        raise SystemExit(f"run_vllm: {run.title}, {run.dtype}: exit code {done.returncode}")
    found: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
    return found


def problems_of(run: Run, results: Mapping[Run, dict[str, Any]]) -> list[str]:
    """What is wrong with a run, in sentences."""
    mine, own = results[run], results[Run(None, run.dtype)]
    where, found = f"{run.title}, {run.dtype}", []
    calls = sum(mine["calls"].values())
    if run.backend is None and calls:
        found.append(f"{where}: attn's adapters ran {calls} times")
    if run.backend is not None and not calls:
        found.append(f"{where}: attn's adapters never ran")
    if run.dtype == "float32":
        for which in ("first_texts", "texts"):
            unequal = [i for i, text in enumerate(mine[which]) if text != own[which][i]]
            if unequal:
                found.append(f"{where}: {which} {unequal} differ from vLLM's own")
    if not any(mine["cached_tokens"]):
        found.append(f"{where}: no prefix came from the cache")
    return found


def started(options: argparse.Namespace, model: Path, refusal: Refusal) -> list[str]:
    """What is wrong with a start that must fail, in sentences."""
    print(f"run_vllm: must be refused: {refusal.backend} {' '.join(refusal.options)}", flush=True)
    output = options.results / "refused.json"
    more = (*refusal.options, "--output", str(output))
    done = start(options, model, refusal.backend, *more)
    lacking = [word for word in refusal.words if word not in done.stdout]
    if done.returncode == 0:
        return [f"{refusal.backend} {refusal.options} was not refused"]
    if lacking:
        return [f"refusing {refusal.backend} does not say {lacking}: {done.stdout[-1500:]}"]
    return []


def table(results: Mapping[Run, dict[str, Any]]) -> str:
    """The comparison, a line per run."""
    lines = [f"{'backend':20} {'dtype':9} {'texts':12} {'calls':>7} {'tokens/s':>9}  over vLLM's"]
    for run, mine in results.items():
        own = results[Run(None, run.dtype)]
        same = sum(a == b for a, b in zip(mine["texts"], own["texts"], strict=True))
        rate, other = (each["new_tokens"] / each["seconds"] for each in (mine, own))
        equal = f"{same} of {len(mine['texts'])}"
        calls = sum(mine["calls"].values())
        lines.append(
            f"{run.title:20} {run.dtype:9} {equal:12} {calls:7} {rate:9.1f}  {rate / other:.2f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
