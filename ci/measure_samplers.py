"""Measure the samplers of a GPU beside each other.

    python ci/measure_samplers.py --output samplers.json

Each round times every sampler once, in changing order, behind a kernel that keeps the device busy
while the host enqueues, so that the time is the device's. Medians over the rounds, in us; the
host's time of a call beside them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

__all__ = ["main", "measure"]

CALLS, BUSY_CYCLES = 4, 3_000_000
ASKED: dict[str, dict[str, Any]] = {
    "plain": {},
    "top-k 50": {"top_k": 50},
    "top-p 0.9": {"top_p": 0.9},
    "both, temperature 0.7": {"top_k": 50, "top_p": 0.9, "temperature": 0.7},
    "min-p": {"min_p": 0.05},
    "greedy": {"temperature": 0.0},
}


def measure(samplers: dict[str, Any], logits: Any, params: Any, rounds: int) -> dict[str, Any]:
    """Return a row of figures: of each sampler the device's and the host's us of a call."""
    import torch

    device: dict[str, list[float]] = {name: [] for name in samplers}
    host: dict[str, list[float]] = {name: [] for name in samplers}
    for sampler in samplers.values():
        for _ in range(2):
            sampler.sample(logits, params)
    torch.cuda.synchronize()
    for turn in range(rounds):
        for name in sorted(samplers, reverse=turn % 2 == 1):
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(BUSY_CYCLES)
            first.record()
            start = time.perf_counter()
            for _ in range(CALLS):
                samplers[name].sample(logits, params)
            host[name].append((time.perf_counter() - start) / CALLS * 1e6)
            last.record()
            torch.cuda.synchronize()
            device[name].append(first.elapsed_time(last) / CALLS * 1e3)
    return {
        name: {
            "device_us": round(statistics.median(device[name]), 1),
            "least_us": round(min(device[name]), 1),
            "host_us": round(statistics.median(host[name]), 1),
        }
        for name in samplers
    }


def main(arguments: list[str] | None = None) -> int:
    """Print a line for each case and write all of them."""
    import torch

    from attn_shared.errors import AttnError
    from attn_shared.sampling import Sampler, SamplingParams

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--output", type=Path, help="where the figures go, as JSON")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args(arguments)
    samplers: dict[str, Any] = {}
    for name in ("TORCH", "FLASHINFER"):
        try:
            made = Sampler("cuda", sampler=name)
            made.sample(torch.zeros(2, 1000, device="cuda"), SamplingParams(top_k=5, top_p=0.5))
        except AttnError as error:
            print(f"{name} does not run here: {error.message[:300]}", file=sys.stderr)
            continue
        samplers[name] = made
    rows: list[dict[str, Any]] = []
    for vocabulary in (32_000, 128_256):
        for batch in (1, 32, 256):
            logits = torch.randn(batch, vocabulary, device="cuda") * 3
            for case, asked in ASKED.items():
                found = measure(samplers, logits, SamplingParams(**asked), options.rounds)
                rows.append({"rows": batch, "vocabulary": vocabulary, "case": case, **found})
                print(json.dumps(rows[-1]), flush=True)
                if options.output is not None:
                    options.output.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
