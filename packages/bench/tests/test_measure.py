from __future__ import annotations

from collections.abc import Iterator
from itertools import count, pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from attn_bench_testing import CPU, FakeContender, FakeTimer, workload

from attn_bench import measure, memory
from attn_bench.measure import Bench
from attn_bench.results import Settings, SkippedStatus
from attn_shared.errors import UnsupportedOptionError

pytestmark = pytest.mark.usefixtures("small_limits")


def bench(rounds: int = 5, times: Iterator[float] | None = None) -> Bench:
    return Bench(CPU, Settings(rounds=rounds), timer=FakeTimer(times or count(1.0)))


def wrong(result: list[Any]) -> list[Any]:
    return [part * 2 for part in result]


def test_each_round_measures_everyone_once() -> None:
    ours, peer = FakeContender("OURS"), FakeContender("PEER")
    rounds: list[tuple[int, int]] = []
    calls: list[tuple[int, int]] = []

    def on_round(done: int, total: int) -> None:
        rounds.append((done, total))
        calls.append((ours.num_calls, peer.num_calls))

    group = bench(5).measure(workload(), ours, [peer], on_round=on_round)
    assert rounds == [(done, 5) for done in (1, 2, 3, 4, 5)]
    assert all(after == (a + 1, b + 1) for (a, b), after in pairwise(calls))
    (cell,) = group.cells
    assert (cell.backend, cell.peer, cell.rounds) == ("OURS", "PEER", 5)
    assert (len(group.limits["read"]), len(group.limits["matmul"])) == (5, 5)
    assert group.dtype == "float32"


def test_a_backend_that_is_wrong_has_no_cell() -> None:
    group = bench().measure(workload(), FakeContender("OURS", after=wrong), [FakeContender()])
    assert group.cells == ()
    (skipped,) = group.skipped
    assert (skipped.backend, skipped.peer, skipped.status) == ("OURS", None, SkippedStatus.WRONG)
    assert skipped.label == "2x9"


def test_a_peer_that_is_wrong_leaves_the_others() -> None:
    peers = [FakeContender("BAD", after=wrong), FakeContender("GOOD")]
    group = bench().measure(workload(), FakeContender("OURS"), peers)
    assert [cell.peer for cell in group.cells] == ["GOOD"]
    assert [(entry.backend, entry.peer) for entry in group.skipped] == [("OURS", "BAD")]


def test_without_a_peer_that_runs_the_backend_keeps_its_figures() -> None:
    group = bench().measure(workload(), FakeContender("OURS"), [FakeContender("BAD", after=wrong)])
    assert [cell.peer for cell in group.cells] == [None]
    assert len(group.skipped) == 1


def test_what_does_not_fit_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_host_bytes", lambda: 100)
    contender = FakeContender()
    group = bench().measure(workload(), contender)
    (skipped,) = group.skipped
    assert skipped.status is SkippedStatus.MEMORY
    assert "are free on cpu" in skipped.reason
    assert contender.num_calls == 0


def test_a_cache_that_cannot_be_counted_is_refused() -> None:
    group = bench().measure(workload(kv_cache_dtype="nvfp4"), FakeContender())
    (skipped,) = group.skipped
    assert (skipped.status, skipped.exit_code) == (SkippedStatus.REFUSED, 2)


def test_the_time_budget_ends_the_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = count(0.0, 10.0)  # every look at the clock is ten seconds later
    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    (cell,) = bench(50).measure(workload(), FakeContender(), seconds=65.0).cells
    assert cell.rounds == 7
    assert cell.notes == ("7 of 50 rounds: the time budget ended",)


def test_a_short_time_is_enough_for_three_rounds() -> None:
    (cell,) = bench(50).measure(workload(), FakeContender(), seconds=1e-9).cells
    assert cell.rounds == 3


def test_a_fault_while_it_is_timed_is_part_of_the_result() -> None:
    def times() -> Iterator[float]:
        yield 1.0
        raise RuntimeError("an illegal memory access was encountered")

    group = bench(times=times()).measure(workload(), FakeContender("OURS"), [FakeContender()])
    assert group.cells == ()
    (skipped,) = group.skipped
    assert (skipped.backend, skipped.status) == ("OURS", SkippedStatus.FAILED)
    assert skipped.reason.startswith("while it was timed: RuntimeError: an illegal memory access")


def test_an_interruption_is_raised() -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bench().measure(workload(), FakeContender(before=interrupt))


def test_graphs_need_a_device_that_has_them() -> None:
    with pytest.raises(UnsupportedOptionError, match="device cpu has no graphs"):
        Bench(CPU, Settings(graph=True))


def test_a_real_timer_gives_figures() -> None:
    real = Bench(CPU, Settings(rounds=3, cache_state="warm"))
    (cell,) = real.measure(workload(), FakeContender()).cells
    assert cell.cache_state == "warm"
    assert cell.time_us > 0
    assert cell.gb_per_s > 0
