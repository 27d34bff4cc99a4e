"""One group of cells: a workload, a backend, and the peers beside it, in the same rounds."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch

from attn_bench.cells import make_cells
from attn_bench.contenders import Contender
from attn_bench.counting import count
from attn_bench.graphs import check_graphs
from attn_bench.limits import LimitRunner, limit_bytes, machine_limits
from attn_bench.memory import bytes_needed, shortage
from attn_bench.results import Cell, Settings, Skipped, SkippedStatus, shape_fields
from attn_bench.rounds import orders
from attn_bench.runners import Runner, UnmeasuredError, ready
from attn_bench.slow_paths import SlowPathGuard
from attn_bench.timing import Timer, num_copies_for, timer_for
from attn_bench.workloads import Workload
from attn_shared.dtypes import dtype_name
from attn_shared.errors import AttnError, own_words

__all__ = ["Bench", "Group", "unmeasured"]

_LEAST_ROUNDS = 3  # however short the time is

OnRound = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """What came of a workload and a backend.

    Attributes:
        cells: one per peer that ran; one without a peer where none was asked for or none ran.
        skipped: the backend, or peers, that did not run.
        limits: rates of the machine by name ("read", "matmul"), one per round.
        dtype: of the workload, and so of the matrix product.
        libraries: versions of the vendor libraries behind the figures.
    """

    cells: tuple[Cell, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    limits: Mapping[str, Sequence[float]] = field(default_factory=dict)
    dtype: str = ""
    libraries: Mapping[str, str] = field(default_factory=dict)


def unmeasured(
    workload: Workload,
    backend: str,
    error: UnmeasuredError,
    peer: str | None = None,
) -> Skipped:
    """Return the record of what was not measured, and why."""
    return Skipped(
        backend=backend,
        peer=peer,
        status=error.status,
        reason=error.message,
        exit_code=error.code,
        **shape_fields(workload),
    )


class Bench:
    """What all groups of a run share: the device, its timer, how to measure, what was heard."""

    def __init__(
        self, device: torch.device, settings: Settings, *, timer: Timer | None = None
    ) -> None:
        """Prepare the timer.

        Args:
            device: where everything runs.
            settings: how to measure.
            timer: in place of the device's own.

        Raises:
            UnsupportedOptionError: graphs were asked for, and the device has none.
        """
        if settings.graph:
            check_graphs(device)
        if device.index is not None and device.type != "cpu":
            torch.get_device_module(device).set_device(device)  # events are the current device's
        self.device = device
        self.settings = settings
        self._guard = SlowPathGuard()
        self._timer = timer or timer_for(device, is_cold=settings.cache_state == "cold")
        self._limits: dict[torch.dtype, tuple[LimitRunner, ...]] = {}

    def measure(
        self,
        workload: Workload,
        backend: Contender,
        peers: Sequence[Contender] = (),
        *,
        seconds: float | None = None,
        on_round: OnRound = lambda done, total: None,
    ) -> Group:
        """Measure a backend and its peers in the same rounds.

        What cannot be measured is part of the result; only an interruption is raised.

        Args:
            workload: the batch.
            backend: what is measured.
            peers: what it is measured beside.
            seconds: time to spend; at least a few rounds are measured whatever it is.
            on_round: told after each round how many are done, and how many are planned.
        """
        deadline = None if seconds is None else time.perf_counter() + seconds
        try:
            return self._measure(workload, backend, peers, deadline, on_round)
        except UnmeasuredError as error:
            return Group(skipped=(unmeasured(workload, backend.name, error),))
        except RuntimeError as error:
            words = f"while it was timed: {own_words(error)}"
            failed = UnmeasuredError(SkippedStatus.FAILED, words, 1)
            return Group(skipped=(unmeasured(workload, backend.name, failed),))
        finally:
            self._release()

    def _measure(
        self,
        workload: Workload,
        backend: Contender,
        peers: Sequence[Contender],
        deadline: float | None,
        on_round: OnRound,
    ) -> Group:
        num_copies = self._check_memory(workload, 1 + len(peers))
        limits = self._limits_of(workload.dtype)
        runner = self._ready(workload, backend, num_copies)
        beside, skipped = [], []
        for peer in peers:
            try:
                beside.append(self._ready(workload, peer, num_copies))
            except UnmeasuredError as error:
                skipped.append(unmeasured(workload, runner.name, error, peer.name))
        notes = self._run_rounds([runner, *beside, *limits], deadline, on_round)
        return Group(
            cells=make_cells(workload, self.settings, runner, beside, limits, notes),
            skipped=tuple(skipped),
            limits={limit.name: limit.rates for limit in limits},
            dtype=dtype_name(workload.dtype),
            libraries={
                name: version
                for each in (runner, *beside)
                for name, version in each.prepared.libraries.items()
            },
        )

    def _ready(self, workload: Workload, contender: Contender, num_copies: int) -> Runner:
        return ready(
            contender,
            workload,
            self._timer,
            self._guard,
            num_copies=num_copies,
            with_graph=self.settings.graph,
        )

    def _check_memory(self, workload: Workload, num_contenders: int) -> int:
        """Return how many copies of the inputs to make.

        Raises:
            UnmeasuredError: they do not fit into memory, or nobody can say what they take.
        """
        try:
            working_set = count(workload).num_bytes
        except AttnError as error:
            raise UnmeasuredError(SkippedStatus.REFUSED, error.message, error.exit_code) from error
        copies = num_copies_for(self.device, working_set, is_cold=self._timer.is_cold)
        new_limits = (
            0 if workload.dtype in self._limits else limit_bytes(self.device, workload.dtype)
        )
        needed = bytes_needed(workload, num_contenders, copies)
        reason = shortage(self.device, (needed, new_limits))
        if reason:
            raise UnmeasuredError(SkippedStatus.MEMORY, reason, 1)
        return copies

    def _limits_of(self, dtype: torch.dtype) -> tuple[LimitRunner, ...]:
        """Return the machine's limits, those of one dtype at a time in memory."""
        if dtype not in self._limits:
            self._limits.clear()
            self._limits[dtype] = machine_limits(self.device, dtype)
            for limit in self._limits[dtype]:
                limit.warm_up()
        return tuple(limit.fresh() for limit in self._limits[dtype])

    def _run_rounds(
        self,
        runners: Sequence[Runner | LimitRunner],
        deadline: float | None,
        on_round: OnRound,
    ) -> tuple[str, ...]:
        """Measure every runner once per round; return what to say about the rounds."""
        rounds = self.settings.rounds
        for done, order in enumerate(orders(len(runners), rounds), start=1):
            for index in order:
                runners[index].measure(self._timer)
            on_round(done, rounds)
            is_late = deadline is not None and time.perf_counter() > deadline
            if is_late and _LEAST_ROUNDS <= done < rounds:
                return (f"{done} of {rounds} rounds: the time budget ended",)
        return ()

    def _release(self) -> None:
        """Give memory back before the next group asks for it."""
        gc.collect()
        empty_cache = getattr(torch.get_device_module(self.device), "empty_cache", None)
        if empty_cache is not None:
            with suppress(RuntimeError):  # after a fault the device gives nothing back
                empty_cache()
