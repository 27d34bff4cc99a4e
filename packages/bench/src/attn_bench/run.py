"""A whole run: workload after workload, the file written after each, so that nothing is lost."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

import torch

from attn_bench.contenders import Contender
from attn_bench.machine import describe_machine, installed_versions, load_note
from attn_bench.measure import Bench, Group, unmeasured
from attn_bench.results import (
    Cell,
    Results,
    Settings,
    Skipped,
    SkippedStatus,
    shape_fields,
    write_results,
)
from attn_bench.runners import UnmeasuredError
from attn_bench.workloads import Workload
from attn_shared.errors import InvalidInputError

__all__ = ["Outcome", "Plan", "Progress", "Silence", "run"]

_TRANSIENT = (SkippedStatus.BUDGET, SkippedStatus.MEMORY)  # may go better the next time


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to measure.

    Attributes:
        workloads: batches, of any layers and dtypes.
        backends: measured one after another on each.
        peers: what each backend is measured beside, in the same rounds.
        device: where.
        settings: how.
        seconds: of the whole run; each cell gets an equal part of what is left. None: no bound.
        notes: for the reader of the figures, kept with the machine.
    """

    workloads: Sequence[Workload]
    backends: Sequence[Contender]
    peers: Sequence[Contender] = ()
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    settings: Settings = field(default_factory=Settings)
    seconds: float | None = None
    notes: tuple[str, ...] = ()

    def groups(self) -> Iterator[tuple[Workload, Contender]]:
        """Yield what is measured together with its peers."""
        for workload in self.workloads:
            for backend in self.backends:
                yield workload, backend


class Progress(Protocol):
    """Is told how far a run is."""

    def begin(self, total: int) -> None:
        """`total` groups of cells will be measured."""

    def group(self, index: int, name: str) -> None:
        """A group begins; `index` of them are done."""

    def round(self, done: int, total: int) -> None:
        """So many rounds of the group are done."""

    def problem(self, words: str) -> None:
        """Something went wrong that the user should know at once."""


class Silence:
    """Nobody is told."""

    def begin(self, total: int) -> None:
        """Say nothing."""

    def group(self, index: int, name: str) -> None:
        """Say nothing."""

    def round(self, done: int, total: int) -> None:
        """Say nothing."""

    def problem(self, words: str) -> None:
        """Say nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run ended.

    Attributes:
        results: of every group that was finished.
        is_interrupted: Ctrl-C ended it.
        write_error: why the file does not hold all of the results; None: it does, or there is none.
    """

    results: Results
    is_interrupted: bool = False
    write_error: OSError | None = None


def run(
    plan: Plan,
    *,
    output: Path | None = None,
    resume_from: Results | None = None,
    progress: Progress | None = None,
    bench: Bench | None = None,
) -> Outcome:
    """Measure everything of a plan.

    Args:
        plan: what to measure.
        output: written after each group, whole or not at all. Where that fails, the run goes on
            and tries again after the next.
        resume_from: results of an earlier run of the same plan; what they hold is not measured
            again.
        progress: is told how far the run is.
        bench: in place of one that is made for the device.

    Raises:
        InvalidInputError: the output cannot be written at all, or the earlier results are of
            another machine, other versions or other settings.
        UnsupportedOptionError: graphs were asked for, and the device has none.
    """
    bench = bench or Bench(plan.device, plan.settings)
    results = _begin(plan)
    if resume_from is not None:
        results = _resumed(resume_from, results)
    recorder = _Recorder(results, output, progress or Silence())
    recorder.check_output()
    return recorder.record(plan, bench)


def _begin(plan: Plan) -> Results:
    notes = (*plan.notes, load_note())
    return Results(
        date=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        machine=describe_machine(plan.device, [note for note in notes if note]),
        versions=installed_versions(),
        settings=plan.settings,
    )


def _resumed(earlier: Results, now: Results) -> Results:
    """Return the earlier results, which this run goes on with."""
    for name, old, new in (
        ("machine", replace(earlier.machine, notes=()), replace(now.machine, notes=())),
        ("settings", earlier.settings, now.settings),
        ("versions", earlier.versions, {**earlier.versions, **now.versions}),
    ):
        if old != new:
            raise InvalidInputError.for_argument(
                f"{name} of the earlier results",
                old,
                f"{new}, as they are now",
                hint="write to another file.",
            )
    notes = tuple(dict.fromkeys((*earlier.machine.notes, *now.machine.notes)))
    return replace(earlier, machine=replace(earlier.machine, notes=notes))


class _Recorder:
    """Collects the groups of a run and keeps the file up to date."""

    def __init__(self, results: Results, output: Path | None, progress: Progress) -> None:
        self._results = results
        self._output = output
        self._progress = progress
        self._write_error: OSError | None = None

    def check_output(self) -> None:
        """Write what there is already: a path that cannot be written is no news at the end."""
        if self._output is not None and self._output.exists() and not self._output.is_file():
            raise InvalidInputError.for_argument("output", repr(str(self._output)), "a file")
        self._save()
        if self._write_error is not None:
            raise InvalidInputError.for_argument(
                "output",
                f"{str(self._output)!r} ({self._write_error.strerror or self._write_error})",
                "a file that can be written",
            ) from self._write_error

    def record(self, plan: Plan, bench: Bench) -> Outcome:
        """Measure each group that the results do not hold yet."""
        groups = [pair for pair in plan.groups() if not self._holds(plan, *pair)]
        self._progress.begin(len(groups))
        started = time.perf_counter()
        is_interrupted = False
        try:
            for index, (workload, backend) in enumerate(groups):
                self._progress.group(index, f"{backend.name}: {workload.name}")
                left = _seconds_left(plan, started)
                share = None if left is None else left / (len(groups) - index)
                self._add(self._measure(plan, bench, workload, backend, share))
                self._save()
        except KeyboardInterrupt:
            is_interrupted = True
            self._save()
        return Outcome(
            results=self._results,
            is_interrupted=is_interrupted,
            write_error=self._write_error,
        )

    def _measure(
        self,
        plan: Plan,
        bench: Bench,
        workload: Workload,
        backend: Contender,
        seconds: float | None,
    ) -> Group:
        if seconds is not None and seconds <= 0:
            words = "the time budget ended before its turn"
            late = UnmeasuredError(SkippedStatus.BUDGET, words, 0)
            return Group(skipped=(unmeasured(workload, backend.name, late),))
        return bench.measure(
            workload, backend, plan.peers, seconds=seconds, on_round=self._progress.round
        )

    def _holds(self, plan: Plan, workload: Workload, backend: Contender) -> bool:
        """Whether the results have a cell for each peer of a group, or said why one is missing."""
        shape = shape_fields(workload)

        def is_own(record: Cell | Skipped) -> bool:
            fits = all(getattr(record, name) == value for name, value in shape.items())
            return fits and record.backend == backend.name

        final = [item for item in self._results.skipped if item.status not in _TRANSIENT]
        refused = {item.peer for item in final if is_own(item)}
        measured = {cell.peer for cell in self._results.cells if is_own(cell)}
        wanted: set[str | None] = {peer.name for peer in plan.peers} or {None}
        return None in refused or wanted <= (measured | refused)

    def _add(self, group: Group) -> None:
        for skipped in group.skipped:
            beside = f" (as a peer of {skipped.backend})" if skipped.peer else ""
            self._progress.problem(f"not measured{beside}: {skipped.reason}")
        results, limits = self._results.with_group(group.cells, group.skipped), group.limits
        if limits:
            own = results.limits.with_rounds(group.dtype, limits["read"], limits["matmul"])
            results = replace(results, limits=own)
        self._results = replace(results, versions={**results.versions, **group.libraries})

    def _save(self) -> None:
        """Write the file; a failure is told, kept, and made good by the next time."""
        if self._output is None:
            return
        try:
            write_results(self._results, self._output)
            self._write_error = None
        except OSError as error:
            self._write_error = error
            self._progress.problem(
                f"{self._output} could not be written ({error.strerror or error}); "
                "it holds what was finished before"
            )


def _seconds_left(plan: Plan, started: float) -> float | None:
    if plan.seconds is None:
        return None
    return plan.seconds - (time.perf_counter() - started)
