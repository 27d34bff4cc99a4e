"""Getting a contender ready to be timed: built, run once, found right, captured, warmed up."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attn_bench.agreement import WrongResultError, check_agreement
from attn_bench.contenders import Contender, Copy, Prepared
from attn_bench.graphs import Replay, capture, is_captured, level_needed
from attn_bench.results import SkippedStatus
from attn_bench.slow_paths import SlowPathGuard
from attn_bench.timing import Call, PlanTime, Timer
from attn_bench.workloads import Workload
from attn_shared.errors import AttnError, own_words

__all__ = ["Runner", "UnmeasuredError", "ready"]

_WARM_UP_S = 0.1
_MOST_WARM_UPS = 5


class UnmeasuredError(AttnError):
    """A contender that is not timed, and the kind of reason."""

    def __init__(self, status: SkippedStatus, reason: str, code: int) -> None:
        super().__init__(reason)
        self.status = status
        self.code = code


class Runner:
    """A contender that has run and answered rightly.

    Attributes:
        prepared: what runs.
        calls: what is timed: one per set of inputs, or the replay of a graph that holds them all.
        mode: "graph" where a capture is replayed, else "eager".
        notes: what a reader of the figures must know.
        times: microseconds of a call, one measurement per round.
        hosts: the host's time to issue a call outside a graph, one measurement per round; empty
            where it does all of the work.
        plans: the host's work of a step, one per round; empty where there is none.
        plan_waits: whether that made the host wait for the device; None: there is no plan, or
            nobody can tell.
    """

    def __init__(self, prepared: Prepared, replay: Replay | None, notes: Sequence[str]) -> None:
        """Take the calls, or what replays them."""
        self.prepared = prepared
        self._own_calls: tuple[Call, ...] = tuple(copy.call for copy in prepared.copies)
        self.calls = self._own_calls if replay is None else (replay.call,)
        self.mode = "eager" if replay is None else "graph"
        self.notes = (*prepared.notes, *notes)
        self.times: list[float] = []
        self.hosts: list[float] = []
        self.plans: list[PlanTime] = []
        self.plan_waits: bool | None = None
        self._issue_us = 0.0
        self._replay = replay  # a capture lives as long as it is referred to

    @property
    def name(self) -> str:
        """What runs."""
        return self.prepared.name

    def warm_up(self, timer: Timer) -> None:
        """Call for a while, and see how long the host takes, and whether a plan makes it wait."""
        _warm_up(self.calls, timer)
        self._issue_us = timer.host_us(self.calls) or 0.0
        if self.prepared.plan is not None:
            self.plan_waits = timer.waits(self.prepared.plan)

    def measure(self, timer: Timer) -> None:
        """Take one measurement of a call, of issuing it, and of the host's work of a step."""
        each = 1 if self._replay is None else self._replay.count
        self.times.append(timer.time_us(self.calls, self._issue_us, calls_each=each))
        host_us = timer.host_us(self._own_calls)
        self.hosts += [] if host_us is None else [host_us]
        if self.prepared.plan is not None:
            self.plans.append(timer.plan_us(self.prepared.plan))


def ready(
    contender: Contender,
    workload: Workload,
    timer: Timer,
    guard: SlowPathGuard,
    *,
    num_copies: int,
    with_graph: bool,
) -> Runner:
    """Build a contender, run it, and hold its answer to the reference.

    Raises:
        UnmeasuredError: it does not serve the workload, is slow in silence, wrong, or fails.
    """
    with_graph = with_graph and is_captured(workload)
    try:
        return _ready(contender, workload, timer, guard, num_copies, with_graph)
    except UnmeasuredError:
        raise
    except WrongResultError as error:
        raise UnmeasuredError(SkippedStatus.WRONG, str(error), error.exit_code) from error
    except AttnError as error:
        raise UnmeasuredError(SkippedStatus.REFUSED, _first_line(error), error.exit_code) from error
    except Exception as error:
        status = SkippedStatus.MEMORY if _is_out_of_memory(error) else SkippedStatus.FAILED
        raise UnmeasuredError(status, f"{contender.name}: {own_words(error)}", 1) from error


def _ready(
    contender: Contender,
    workload: Workload,
    timer: Timer,
    guard: SlowPathGuard,
    num_copies: int,
    with_graph: bool,
) -> Runner:
    with guard.listen(contender.name) as notes:
        prepared = contender.prepare(workload, timer.device, num_copies, is_captured=with_graph)
        results = [copy.call() for copy in prepared.copies]
        timer.synchronize()
    if prepared.is_attention:
        check_agreement(prepared.name, prepared.copies[0], results[0])
    del results
    replay: Replay | None = None
    if with_graph and prepared.graph_level >= level_needed(workload):
        first = 1 if not timer.is_cold else None  # a warm call follows itself
        replay = capture([copy.call for copy in prepared.copies[:first]])
        _check_replay(prepared, replay)
    elif with_graph:
        notes.append(f"{prepared.name} ran without a graph: declares {prepared.graph_level.name}")
    runner = Runner(prepared, replay, notes)
    runner.warm_up(timer)
    return runner


def _check_replay(prepared: Prepared, replay: Replay) -> None:
    """A replay must answer as the call did, from results that were wiped."""
    copy: Copy = prepared.copies[0]
    for tensor in _tensors(replay.result):
        if tensor.is_floating_point():
            tensor.fill_(torch.nan)
    replay.call()
    check_agreement(f"{prepared.name} (replayed)", copy, replay.result)


def _tensors(result: Any) -> list[Tensor]:
    parts = [result] if isinstance(result, Tensor) else list(result)
    return [part for part in parts if isinstance(part, Tensor)]


def _warm_up(calls: Sequence[Call], timer: Timer) -> None:
    """Call for a while, so that clocks, thread pools and allocators are as they will be."""
    start = time.perf_counter()
    for _ in range(_MOST_WARM_UPS):
        for call in calls:
            call()
        timer.synchronize()
        if time.perf_counter() - start > _WARM_UP_S:
            return


def _first_line(error: AttnError) -> str:
    """Return the error's words without a table of verdicts."""
    return str(error).splitlines()[0] if getattr(error, "selection", None) else str(error)


def _is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "allocate memory" in str(error)
