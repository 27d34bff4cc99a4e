"""From measurements to figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attn_bench.counting import count
from attn_bench.limits import LimitRunner
from attn_bench.medians import interval, median, ratios
from attn_bench.results import Cell, Settings, shape_fields
from attn_bench.runners import Runner
from attn_bench.workloads import Workload

__all__ = ["make_cells"]


def make_cells(
    workload: Workload,
    settings: Settings,
    backend: Runner,
    peers: Sequence[Runner],
    limits: Sequence[LimitRunner],
    notes: Sequence[str],
) -> tuple[Cell, ...]:
    """Return a cell for each peer, or one without a peer.

    Args:
        workload: the batch.
        settings: how it was measured.
        backend: its measurements, one per round.
        peers: theirs, of the same rounds.
        limits: the machine's, of the same rounds.
        notes: about the rounds.
    """
    own = _own_figures(workload, settings, backend, limits)
    if not peers:
        return (_without_peer(own, (*backend.notes, *notes)),)
    return tuple(
        Cell(**own, **_beside(backend, peer), notes=(*backend.notes, *peer.notes, *notes))
        for peer in peers
    )


def _own_figures(
    workload: Workload, settings: Settings, backend: Runner, limits: Sequence[LimitRunner]
) -> dict[str, Any]:
    """Return the fields that do not depend on the peer."""
    work = count(workload)
    amounts = {"read": work.num_bytes, "matmul": work.operations}
    shares = {limit.name: _share(amounts[limit.name], backend.times, limit) for limit in limits}
    time_us = median(backend.times)
    return {
        **shape_fields(workload),
        "backend": backend.name,
        "block_size": backend.prepared.block_size,
        "time_us": time_us,
        "interval_us": interval(backend.times),
        "gb_per_s": work.num_bytes / time_us / 1e3,
        "tflop_per_s": work.operations / time_us / 1e6,
        "share_of_read": shares["read"],
        "share_of_matmul": shares["matmul"],
        **_host_figures(backend, ""),
        "cache_state": settings.cache_state,
        "mode": backend.mode,
        "rounds": len(backend.times),
    }


def _share(amount: int, times: Sequence[float], limit: LimitRunner) -> float:
    """Return which part of the limit's rate was reached: the median over rounds."""
    scale = amount / limit.amount
    return median(scale * ratio for ratio in ratios(limit.times, times))


def _beside(backend: Runner, peer: Runner) -> dict[str, Any]:
    """Return the fields that compare with a peer."""
    own = ratios(backend.times, peer.times)
    return {
        "peer": peer.name,
        "peer_time_us": median(peer.times),
        "peer_interval_us": interval(peer.times),
        "ratio": median(own),
        "ratio_interval": interval(own),
        "peer_mode": peer.mode,
        **_host_figures(peer, "peer_"),
    }


def _host_figures(runner: Runner, prefix: str) -> dict[str, Any]:
    """Return what the host's work took, under names that begin with `prefix`."""
    hosts, plans = runner.hosts, runner.plans
    return {
        f"{prefix}host_us": median(hosts) if hosts else None,
        f"{prefix}host_interval_us": interval(hosts) if hosts else None,
        f"{prefix}plan_us": median(plan.done_us for plan in plans) if plans else None,
        f"{prefix}plan_host_us": median(plan.host_us for plan in plans) if plans else None,
        f"{prefix}plan_waits": runner.plan_waits,
    }


def _without_peer(own: dict[str, Any], notes: tuple[str, ...]) -> Cell:
    return Cell(
        **own,
        peer=None,
        peer_time_us=None,
        peer_interval_us=None,
        ratio=None,
        ratio_interval=None,
        peer_mode=None,
        notes=notes,
    )
