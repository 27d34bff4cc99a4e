"""Capturing calls in CUDA graphs, where the backend declares that its batch may be captured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from attn_bench.workloads import Workload
from attn_shared.backend import AttentionCGSupport
from attn_shared.errors import UnsupportedOptionError

__all__ = ["Replay", "capture", "check_graphs", "is_captured", "level_needed", "rotation"]

_WARM_UPS = 2  # calls before capture, on the capturing stream
_LEAST_CALLS = 24  # in a graph
_MOST_QUERIES = 16  # of a request, in a batch that is captured


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Replay:
    """Calls over all sets of inputs in turn, captured in one graph.

    Attributes:
        call: replays them.
        count: how many calls that is.
        result: what the first of them returned while it was captured; each replay fills it anew.
        graph: keeps the capture alive.
    """

    call: Callable[[], None]
    count: int
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


def is_captured(workload: Workload) -> bool:
    """Return whether engines capture such a batch: decode, with draft tokens or without.

    The kernels of a longer query hide the host's time, and capturing it would fix its shape.
    """
    return workload.query_len <= _MOST_QUERIES


def level_needed(workload: Workload) -> AttentionCGSupport:
    """Return the least level at which a batch of these query lengths may be captured."""
    if workload.query_len == 1:
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    if len(set(workload.query_lens)) == 1:
        return AttentionCGSupport.UNIFORM_BATCH
    return AttentionCGSupport.ALWAYS


def rotation(num_calls: int) -> list[int]:
    """Return which of so many calls a graph holds, in order: whole turns, at least 24 calls."""
    turns = -(-_LEAST_CALLS // num_calls)
    return [*range(num_calls)] * turns


def capture(calls: Sequence[Callable[[], Any]]) -> Replay:
    """Capture the calls, each after the other and then again, in one graph.

    Where the calls' inputs together pass the L2, no call finds its own there. One launch of the
    graph is spread over all of its calls, so that what is timed is the device's work.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            for _ in range(_WARM_UPS):
                call()
    torch.cuda.current_stream().wait_stream(stream)
    order = rotation(len(calls))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = calls[order[0]]()
        for index in order[1:]:
            calls[index]()
    return Replay(call=graph.replay, count=len(order), result=result, graph=graph)
