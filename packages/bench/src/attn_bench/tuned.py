"""What a run says about the order of backends on this very device, for one kind of layer.

A tuning run is an ordinary run of the bench: one backend, the anchor, with the others as its peers,
in the same rounds. Its file is the table. The order of a request's phase follows from the rounds'
own ratios to the anchor, averaged geometrically over the points of that phase.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch

from attn_bench.contenders import BackendContender
from attn_bench.machine import describe_machine, installed_versions
from attn_bench.results import Cell, Results, Settings
from attn_bench.run import Plan
from attn_bench.workloads import Heads, Workload, WorkloadPhase
from attn_shared.errors import InvalidInputError
from attn_shared.request import AttentionRequest, Phase, window_of

__all__ = [
    "measured_order",
    "mismatch",
    "plain_request",
    "relative_times",
    "tuning_plan",
    "tuning_workloads",
]

_ANCHOR = "TORCH_SDPA"  # serves nearly everything, everywhere
_DECODES = {"cpu": ((1, 1024), (8, 1024), (4, 4096)), "gpu": ((1, 1024), (8, 4096), (32, 2048))}
_PREFILLS = {"cpu": ((1, 512), (1, 1024)), "gpu": ((1, 1024), (1, 4096), (4, 1024))}
_PHASES = {
    Phase.DECODE: (WorkloadPhase.DECODE,),
    Phase.PREFILL: (WorkloadPhase.PREFILL,),
    Phase.MIXED: (WorkloadPhase.DECODE, WorkloadPhase.PREFILL),
}


def tuning_workloads(
    heads: Heads,
    dtype: torch.dtype,
    device: torch.device,
    *,
    kv_cache_dtype: str = "auto",
    window: int | None = None,
) -> tuple[Workload, ...]:
    """Return the points that a layer is tuned at: (batch, keys) of decodes, then of prefills."""
    kind = "cpu" if device.type == "cpu" else "gpu"
    lengths = [
        *((WorkloadPhase.DECODE, 1, batch, keys) for batch, keys in _DECODES[kind]),
        *((WorkloadPhase.PREFILL, keys, batch, keys) for batch, keys in _PREFILLS[kind]),
    ]
    return tuple(
        Workload(
            phase=phase,
            query_lens=(query_len,) * batch,
            seq_lens=(keys,) * batch,
            heads=heads,
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype,
            block_size=None,
            window=window,
        )
        for phase, query_len, batch, keys in lengths
    )


def tuning_plan(
    workloads: Iterable[Workload],
    backends: Iterable[str],
    device: torch.device,
    *,
    settings: Settings | None = None,
    seconds: float | None = None,
) -> Plan:
    """Return the run that measures backends beside one of them.

    Raises:
        InvalidInputError: there are fewer than two backends to compare.
    """
    names = list(dict.fromkeys(backends))
    if len(names) < 2:
        raise InvalidInputError.for_argument(
            "backends", ", ".join(names) or "none", "two that serve the layer on this device"
        )
    anchor = _ANCHOR if _ANCHOR in names else names[0]
    return Plan(
        workloads=tuple(workloads),
        backends=[BackendContender(anchor)],
        peers=[BackendContender(name) for name in names if name != anchor],
        device=device,
        settings=settings or Settings(rounds=7),
        seconds=seconds,
        notes=("measured to choose a backend by",),
    )


def plain_request(cell: Cell) -> AttentionRequest:
    """Return what the layer of a cell asks, of both phases."""
    return AttentionRequest(
        num_heads=cell.num_heads,
        num_kv_heads=cell.num_kv_heads,
        head_size=cell.head_size,
        dtype=cell.dtype,  # type: ignore[arg-type]  # accepts names as well
        kv_cache_dtype=cell.kv_cache_dtype,
        window=window_of(cell.window),
    )


def measured_order(results: Results, request: AttentionRequest) -> tuple[str, ...]:
    """Return the backends by measured time for a request, fastest first; () where none was."""
    return tuple(relative_times(results, request))


def relative_times(results: Results, request: AttentionRequest) -> dict[str, float]:
    """Return each backend's time over the fastest's for a request, fastest first.

    Only a request that asks what was measured gets an answer: the same heads, dtype, cache format
    and window, and no feature beside. A backend counts if it ran at every point of the phase; a
    ratio that is not positive, which no clock gives, counts as no run.
    """
    phases = {str(phase) for phase in _PHASES[request.phase]}
    free = request.with_options(phase=Phase.MIXED, block_size=None, kv_layout=None)
    scores = _scores(
        cell
        for cell in results.cells
        if cell.phase in phases
        and cell.shared_prefix_len == 0
        and cell.head_size_v is None
        and plain_request(cell) == free
    )
    least = min(scores.values(), default=1.0)
    return {name: scores[name] / least for name in sorted(scores, key=scores.__getitem__)}


def _scores(cells: Iterable[Cell]) -> dict[str, float]:
    """Return each backend's time over the anchor's: the geometric mean over all points."""
    points: dict[str, dict[str, float]] = {}
    for cell in cells:
        if cell.peer is not None and cell.ratio is not None and cell.ratio > 0:
            at_point = points.setdefault(cell.label + cell.phase, {cell.backend: 1.0})
            at_point[cell.peer] = 1 / cell.ratio
    if not points:
        return {}
    everywhere = set.intersection(*(set(times) for times in points.values()))
    return {
        name: math.exp(sum(math.log(times[name]) for times in points.values()) / len(points))
        for name in everywhere
    }


def mismatch(
    results: Results, device: torch.device, libraries: Mapping[str, str] | None = None
) -> str:
    """Say in what the machine or its software is another than that of a run; "" where in nothing.

    Args:
        results: of the run.
        device: a device of this machine.
        libraries: versions of vendor libraries that are installed now, by name.

    Raises:
        NoBackendError: no installed platform has such a device.
    """
    machine = describe_machine(device)
    names = ["name", "arch", "compute_units", "driver", "isa"]
    if device.type == "cpu":
        names.append("threads")
    for name in names:
        before, now = getattr(results.machine, name), getattr(machine, name)
        if before != now:
            return f"it is of {name} {before}, and this is {now}"
    versions = {**installed_versions(), **(libraries or {})}
    for name, before in results.versions.items():
        if versions.get(name) != before:
            return f"it is of {name} {before}, and here is {versions.get(name, 'none')}"
    return ""
