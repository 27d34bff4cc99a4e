"""Capturing calls in CUDA graphs, where the backend declares that its batch may be captured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from attn_bench.workloads import Workload
from attn_shared.backend import AttentionCGSupport
from attn_shared.errors import UnsupportedOptionError

__all__ = ["Replay", "capture", "check_graphs", "level_needed"]

_WARM_UPS = 2  # calls before capture, on the capturing stream


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Replay:
    """A captured call.

    Attributes:
        call: replays it.
        result: what the call returned while it was captured; each replay fills it anew.
        graph: keeps the capture alive.
    """

    call: Callable[[], None]
    result: Any
    graph: torch.cuda.CUDAGraph


def check_graphs(device: torch.device) -> None:
    """Refuse graphs where there are none.

    Raises:
        UnsupportedOptionError: the device is no CUDA device (nor ROCm's, which torch calls so).
    """
    if device.type != "cuda":
        raise UnsupportedOptionError(
            f"device {device} has no graphs; allowed with graphs: a cuda device.",
            hint="leave --graph away.",
        )


def level_needed(workload: Workload) -> AttentionCGSupport:
    """Return the least level at which a batch of these query lengths may be captured."""
    if workload.query_len == 1:
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    if len(set(workload.query_lens)) == 1:
        return AttentionCGSupport.UNIFORM_BATCH
    return AttentionCGSupport.ALWAYS


def capture(calls: Sequence[Callable[[], Any]]) -> tuple[Replay, ...]:
    """Capture each call in a graph of its own; they share memory for what they allocate.

    They may do so because they are replayed one after another.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            for _ in range(_WARM_UPS):
                call()
    torch.cuda.current_stream().wait_stream(stream)
    pool = torch.cuda.graph_pool_handle()
    return tuple(_capture_one(call, pool) for call in calls)


def _capture_one(call: Callable[[], Any], pool: Any) -> Replay:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        result = call()
    return Replay(call=graph.replay, result=result, graph=graph)
