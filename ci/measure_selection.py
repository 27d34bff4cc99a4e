"""How good the choice is: the picked backend's time over the best one's, between tuned points.

python ci/measure_selection.py --device cuda --heads 32/8x128 --seconds 120 --output FILE

A device is tuned as `attn tune` does it; then every backend is measured at points that lie between
the tuned ones, and three choices are held against the best: the measured order, attn's default
order and v0.25.1's order. The figures of several machines go into one file, one after the other.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from attn_bench.results import Results
    from attn_bench.workloads import Workload

__all__ = ["RECORDED_ORDER", "between", "judge", "main"]

RECORDED_ORDER = {
    "cpu": ("CPU_ATTN",),
    "cuda": ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION"),
    "xpu": ("XPU_FLASH_ATTN", "TRITON_ATTN"),
}
"""v0.25.1's order, of capability 9.x and below where that matters."""

_DECODES = {"cpu": ((2, 2048), (6, 1500)), "gpu": ((2, 2048), (4, 3000), (16, 3000))}
_PREFILLS = {"cpu": ((1, 700),), "gpu": ((1, 2048), (2, 1500))}


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--heads", action="append")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--backend", action="append", help="only these; default: all that serve")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args(arguments)
    record = measure(asked)
    _show(record)
    if asked.output is not None:
        _add(asked.output, record)
    return 0


def measure(asked: argparse.Namespace) -> dict[str, Any]:
    """Tune, measure between the points, and judge the choices."""
    import torch

    from attn_bench.tuned import tuning_workloads
    from attn_bench.workloads import Heads
    from attn_shared.dtypes import parse_dtype

    device = torch.device(asked.device)
    layers = [Heads.parse(text) for text in asked.heads or ["32/8x128"]]
    dtype = parse_dtype(asked.dtype)
    tuned = [w for heads in layers for w in tuning_workloads(heads, dtype, device)]
    new = [w for heads in layers for w in between(tuning_workloads(heads, dtype, device), device)]
    table, results = _run(asked, device, tuned), _run(asked, device, new)
    points = judge(table, results, device)
    return {
        "date": table.date,
        "machine": asdict(table.machine),
        "versions": dict(table.versions),
        "rounds": asked.rounds,
        "points": points,
        "summary": _summary(points),
        "skipped": [asdict(entry) for entry in (*table.skipped, *results.skipped)],
    }


def between(tuned: Iterable[Workload], device: torch.device) -> list[Workload]:
    """Points of the same layer that no table holds."""
    from attn_bench.workloads import WorkloadPhase

    first = next(iter(tuned))
    kind = "cpu" if device.type == "cpu" else "gpu"
    lengths = [(WorkloadPhase.DECODE, 1, batch, keys) for batch, keys in _DECODES[kind]]
    lengths += [(WorkloadPhase.PREFILL, keys, batch, keys) for batch, keys in _PREFILLS[kind]]
    return [
        first.with_fields(phase=phase, query_lens=(query_len,) * batch, seq_lens=(keys,) * batch)
        for phase, query_len, batch, keys in lengths
    ]


def _run(asked: argparse.Namespace, device: torch.device, points: list[Workload]) -> Results:
    from attn_bench.results import Settings
    from attn_bench.run import run
    from attn_bench.tuned import tuning_plan

    names = asked.backend or _serving(points[0], device)
    settings = Settings(rounds=asked.rounds)
    plan = tuning_plan(points, names, device, settings=settings, seconds=asked.seconds / 2)
    return run(plan).results


def _serving(point: Workload, device: torch.device) -> list[str]:
    from attn_shared.selection import VerdictStatus

    usable = (VerdictStatus.CHOSEN, VerdictStatus.ELIGIBLE)
    verdicts = _selection(point, device).verdicts
    return [v.name for v in verdicts if v.status in usable and v.priority is not None]


def _selection(point: Workload, device: torch.device, phase: str = "mixed") -> Any:
    from attn_shared.request import AttentionRequest
    from attn_shared.selector import DEFAULT_SELECTOR

    request = AttentionRequest(
        num_heads=point.heads.num_heads,
        num_kv_heads=point.heads.num_kv_heads,
        head_size=point.heads.head_size,
        dtype=point.dtype,
        phase=phase,  # type: ignore[arg-type]  # accepts names as well
    )
    return DEFAULT_SELECTOR.resolve(request, DEFAULT_SELECTOR.device_facts(device))


def judge(tuned: Results, new: Results, device: torch.device) -> list[dict[str, Any]]:
    """Hold three choices against the best at each new point."""
    from attn_bench.tuned import measured_order, plain_request
    from attn_shared.selector import DEFAULT_SELECTOR

    by_point: dict[tuple[str, str, str], list[Any]] = {}
    for cell in new.cells:
        by_point.setdefault((cell.heads, cell.phase, cell.label), []).append(cell)
    found = []
    for (heads, phase, label), cells in by_point.items():
        times = {cells[0].backend: 1.0}
        times |= {c.peer: 1 / c.ratio for c in cells if c.peer is not None and c.ratio is not None}
        request = plain_request(cells[0]).with_options(phase=phase)
        facts = DEFAULT_SELECTOR.device_facts(device)
        default = DEFAULT_SELECTOR.resolve(request, facts).chosen
        orders = {
            "measured": measured_order(tuned, request),
            "default": (str(default),),
            "v0.25.1": RECORDED_ORDER[device.type],
        }
        best = min(times, key=times.__getitem__)
        found.append(
            {
                "layer": heads,
                "phase": phase,
                "lengths": label,
                "best": best,
                "over_best": {n: t / times[best] for n, t in sorted(times.items())},
                **{name: _pick(order, times) for name, order in orders.items()},
            }
        )
    return found


def _pick(order: Iterable[str], times: Mapping[str, float]) -> dict[str, Any] | None:
    """The first of an order that ran, and its time over the best's."""
    name = next((each for each in order if each in times), None)
    return None if name is None else {"pick": name, "over_best": times[name] / min(times.values())}


def _summary(points: list[dict[str, Any]]) -> dict[str, Any]:
    """The geometric mean and the worst of each choice, and how many points it had an answer at."""
    summary = {}
    for name in ("measured", "default", "v0.25.1"):
        ratios = [point[name]["over_best"] for point in points if point[name] is not None]
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else None
        summary[name] = {"points": len(ratios), "mean": mean, "worst": max(ratios, default=None)}
    return summary


def _show(record: dict[str, Any]) -> None:
    for point in record["points"]:
        times = ", ".join(f"{name} {time:.2f}" for name, time in point["over_best"].items())
        picks = "; ".join(
            f"{name}: {point[name]['pick']} {point[name]['over_best']:.2f}"
            for name in ("measured", "default", "v0.25.1")
            if point[name] is not None
        )
        print(f"{point['layer']} {point['phase']} {point['lengths']}: {times} | {picks}")
    for name, figures in record["summary"].items():
        print(f"{name}: {figures}")
    for entry in record["skipped"]:
        print(f"not measured: {entry['peer'] or entry['backend']}: {entry['reason']}")


def _add(path: Path, record: dict[str, Any]) -> None:
    """Put a machine's figures into the file, in the place of older ones of that machine."""
    present = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"machines": []}
    kept = [
        each for each in present["machines"] if each["machine"]["name"] != record["machine"]["name"]
    ]
    whole = {"schema_version": 1, "machines": [*kept, record]}
    path.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
