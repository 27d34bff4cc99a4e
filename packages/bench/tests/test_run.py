from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from attn_bench_testing import CPU, FakeContender, FakeTimer, workload

from attn_bench import results as results_module
from attn_bench.contenders import Contender
from attn_bench.measure import Bench
from attn_bench.results import SkippedStatus, read_results
from attn_bench.run import Outcome, Plan, run
from attn_bench.workloads import Workload
from attn_shared.errors import InvalidInputError

pytestmark = pytest.mark.usefixtures("small_limits")

BATCHES = tuple(workload((1,), (length,)) for length in (3, 5, 7))


class Told:
    """Keeps what a run tells."""

    def __init__(self) -> None:
        self.total = 0
        self.groups: list[str] = []
        self.rounds = 0
        self.problems: list[str] = []

    def begin(self, total: int) -> None:
        self.total = total

    def group(self, index: int, name: str) -> None:
        self.groups.append(f"{index} {name}")

    def round(self, done: int, total: int) -> None:
        self.rounds += 1

    def problem(self, words: str) -> None:
        self.problems.append(words)


class StopsAt(FakeContender):
    """Does something when it is asked for a workload of this length."""

    def __init__(self, length: int, what: Callable[[], None], name: str = "OURS") -> None:
        super().__init__(name)
        self.length, self.what = length, what
        self.seen: list[int] = []

    def prepare(self, workload: Workload, *arguments: Any, **options: Any) -> Any:
        self.seen.append(workload.context)
        if workload.context == self.length:
            self.what()
        return super().prepare(workload, *arguments, **options)


def interrupt() -> None:
    raise KeyboardInterrupt


def nothing() -> None:
    pass


def go(
    backends: Sequence[Contender] = (),
    peers: Sequence[Contender] = (),
    *,
    seconds: float | None = None,
    **options: Any,
) -> Outcome:
    plan = Plan(
        workloads=BATCHES,
        backends=backends or [FakeContender("OURS")],
        peers=peers,
        seconds=seconds,
        settings=replace(Plan(workloads=(), backends=()).settings, rounds=3),
        notes=("a note",),
    )
    timer = FakeTimer(count(1.0))
    return run(plan, bench=Bench(CPU, plan.settings, timer=timer), **options)


def test_every_workload_and_backend_is_measured(tmp_path: Path) -> None:
    told, path = Told(), tmp_path / "a.json"
    two = [FakeContender("OURS"), FakeContender("OTHER")]
    outcome = go(two, [FakeContender("PEER")], output=path, progress=told)
    cells = outcome.results.cells
    assert [(cell.context, cell.backend, cell.peer) for cell in cells] == [
        (length, name, "PEER") for length in (3, 5, 7) for name in ("OURS", "OTHER")
    ]
    assert (told.total, told.rounds, told.problems) == (6, 18, [])
    assert told.groups[1] == "1 OTHER: decode 1x3 4/2x8 float32"
    assert read_results(path) == outcome.results
    assert not outcome.is_interrupted
    assert outcome.write_error is None


def test_the_results_say_where_and_with_what() -> None:
    results = go().results
    assert results.machine.name
    assert "a note" in results.machine.notes
    assert results.versions.keys() >= {"attn", "torch", "python"}
    assert results.date.endswith("Z")
    assert results.limits.read_gb_per_s is not None
    assert results.limits.matmul_tflop_per_s.keys() == {"float32"}
    assert results.settings.rounds == 3


def test_ctrl_c_keeps_what_was_finished(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    outcome = go([StopsAt(7, interrupt)], output=path)
    assert outcome.is_interrupted
    assert [cell.context for cell in read_results(path).cells] == [3, 5]
    assert read_results(path) == outcome.results


def test_a_run_goes_on_where_it_was_interrupted(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    go([StopsAt(7, interrupt)], output=path)
    told, again = Told(), StopsAt(0, nothing)
    outcome = go([again], output=path, resume_from=read_results(path), progress=told)
    assert again.seen == [7]
    assert told.total == 1
    assert [cell.context for cell in outcome.results.cells] == [3, 5, 7]
    limit = outcome.results.limits.read_gb_per_s
    assert limit is not None
    assert len(limit.samples) == 3


def test_a_new_peer_is_measured_when_a_run_goes_on() -> None:
    first = go(peers=[FakeContender("A")])
    second = go(peers=[FakeContender("A"), FakeContender("B")], resume_from=first.results)
    assert sorted((cell.context, cell.peer or "") for cell in second.results.cells) == [
        (length, peer) for length in (3, 5, 7) for peer in "AB"
    ]


def test_what_was_refused_is_not_tried_again(tmp_path: Path) -> None:
    bad = FakeContender("OURS", after=lambda result: [part * 2 for part in result])
    first = go([bad])
    assert len(first.results.skipped) == 3
    calls = bad.num_calls
    assert go([bad], resume_from=first.results).results.skipped == first.results.skipped
    assert bad.num_calls == calls


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("machine", lambda old: replace(old, machine=replace(old.machine, name="Another"))),
        ("settings", lambda old: replace(old, settings=replace(old.settings, rounds=9))),
        ("versions", lambda old: replace(old, versions={**old.versions, "torch": "1.0"})),
    ],
)
def test_results_of_something_else_are_not_continued(what: str, change: Any) -> None:
    earlier = change(go().results)
    with pytest.raises(InvalidInputError, match=f"{what} of the earlier results"):
        go(resume_from=earlier)


def full_disk_while(monkeypatch: pytest.MonkeyPatch, is_full: Callable[[], bool]) -> None:
    real = os.fsync

    def fsync(descriptor: int) -> None:
        if is_full():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    monkeypatch.setattr(results_module.os, "fsync", fsync)


def test_a_full_disk_keeps_the_older_file_and_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, full, told = tmp_path / "a.json", [False], Told()
    full_disk_while(monkeypatch, lambda: full[0])
    outcome = go([StopsAt(5, lambda: full.__setitem__(0, True))], output=path, progress=told)
    assert [cell.context for cell in read_results(path).cells] == [3]
    assert [cell.context for cell in outcome.results.cells] == [3, 5, 7]
    assert outcome.write_error is not None
    assert len(told.problems) == 2
    assert "No space left on device" in told.problems[0]
    assert "it holds what was finished before" in told.problems[0]
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]


def test_a_disk_that_was_full_for_a_while_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, full = tmp_path / "a.json", [False]
    full_disk_while(monkeypatch, lambda: full[0])
    backend = StopsAt(5, lambda: full.__setitem__(0, True))
    freeing = StopsAt(7, lambda: full.__setitem__(0, False), name="OTHER")
    outcome = go([backend, freeing], output=path)
    assert outcome.write_error is None
    assert len(read_results(path).cells) == 6


@pytest.mark.parametrize("name", ["no/such/folder/a.json", "."])
def test_a_path_that_cannot_be_written_is_refused_before_anything_is_measured(
    tmp_path: Path, name: str
) -> None:
    contender = FakeContender("OURS")
    with pytest.raises(InvalidInputError, match="output is"):
        go([contender], output=tmp_path / name)
    assert contender.num_calls == 0


def test_time_is_shared_among_the_cells_that_are_left() -> None:
    outcome = go(seconds=1e-9)
    statuses = [entry.status for entry in outcome.results.skipped]
    assert statuses == [SkippedStatus.BUDGET] * 3
    assert all(entry.exit_code == 0 for entry in outcome.results.skipped)
    again = go(resume_from=outcome.results)
    assert len(again.results.cells) == 3
    assert again.results.skipped == ()


def test_problems_are_told_as_they_come() -> None:
    told = Told()
    bad = FakeContender("BAD", after=lambda result: [part * 2 for part in result])
    go([FakeContender("OURS")], [bad], progress=told)
    assert len(told.problems) == 3
    assert told.problems[0].startswith("not measured (as a peer of OURS): BAD is not timed")
