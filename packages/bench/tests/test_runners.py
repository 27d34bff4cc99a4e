from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import pytest
import torch
from attn_bench_testing import CPU, FakeContender, FakeTimer, workload

from attn_bench import runners
from attn_bench.graphs import Replay
from attn_bench.results import SkippedStatus
from attn_bench.runners import Runner, UnmeasuredError, ready
from attn_bench.slow_paths import SlowPathGuard
from attn_bench.timing import PlanTime
from attn_bench.workloads import WorkloadPhase
from attn_shared.backend import AttentionCGSupport
from attn_shared.errors import NoBackendError, UnsupportedOptionError


def make_ready(contender: FakeContender, *, with_graph: bool = False) -> Runner:
    timer = FakeTimer(count(1.0))
    return ready(
        contender,
        workload(),
        timer,
        SlowPathGuard(),
        num_copies=2,
        with_graph=with_graph,
    )


def raiser(error: BaseException) -> Callable[[], None]:
    def run() -> None:
        raise error

    return run


def say_slow() -> None:
    sys.stderr.write("falling back to eager\n")


def test_a_contender_that_is_right_is_ready() -> None:
    contender = FakeContender(plan=lambda: None)
    runner = make_ready(contender)
    assert (runner.name, runner.mode, len(runner.calls)) == ("FAKE", "eager", 2)
    called = contender.num_calls
    assert called >= 4  # each copy for the first time, and to warm up
    runner.measure(FakeTimer(iter([12.0])))
    assert (runner.times, runner.hosts) == ([12.0], [])
    assert runner.plans == [PlanTime(host_us=3.0, done_us=7.0)]
    assert runner.plan_waits is None  # on a CPU there is nothing to wait for
    assert contender.num_calls == called + 1


@pytest.mark.parametrize(
    ("contender", "status", "words", "code"),
    [
        (
            FakeContender(after=lambda result: [torch.zeros_like(part) for part in result]),
            SkippedStatus.WRONG,
            "FAKE is not timed: its result is wrong",
            1,
        ),
        (
            FakeContender(before=say_slow),
            SkippedStatus.REFUSED,
            "its library took a slow path",
            2,
        ),
        (
            FakeContender(before=raiser(UnsupportedOptionError("no such head size."))),
            SkippedStatus.REFUSED,
            "no such head size.",
            2,
        ),
        (
            FakeContender(before=raiser(NoBackendError("nothing\n a table", selection=object()))),
            SkippedStatus.REFUSED,
            "^nothing$",
            3,
        ),
        (
            FakeContender(before=raiser(RuntimeError("illegal address"))),
            SkippedStatus.FAILED,
            "FAKE: RuntimeError: illegal address",
            1,
        ),
        (
            FakeContender(before=raiser(torch.OutOfMemoryError("too much"))),
            SkippedStatus.MEMORY,
            "FAKE: OutOfMemoryError",
            1,
        ),
        (
            FakeContender(
                before=raiser(RuntimeError("DefaultCPUAllocator: can't allocate memory"))
            ),
            SkippedStatus.MEMORY,
            "allocate memory",
            1,
        ),
    ],
)
def test_what_is_not_timed_and_why(
    contender: FakeContender, status: SkippedStatus, words: str, code: int
) -> None:
    with pytest.raises(UnmeasuredError, match=words) as caught:
        make_ready(contender)
    assert (caught.value.status, caught.value.code) == (status, code)


def test_an_interruption_is_nobodys_failure() -> None:
    with pytest.raises(KeyboardInterrupt):
        make_ready(FakeContender(before=raiser(KeyboardInterrupt())))


@pytest.fixture
def fake_capture(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Graphs that call again, and write what comes of it to where they wrote before."""
    captured: list[Any] = []

    def capture(calls: Sequence[Callable[[], Any]]) -> Replay:
        captured.extend(calls)
        result = calls[0]()

        def again() -> None:
            for old, new in zip(result, calls[0](), strict=True):
                old.copy_(new)

        return Replay(call=again, count=4, result=result, graph=None)  # type: ignore[arg-type]

    monkeypatch.setattr(runners, "capture", capture)
    return captured


def test_what_may_be_captured_is_replayed(fake_capture: list[Any]) -> None:
    level = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    runner = make_ready(FakeContender(graph_level=level), with_graph=True)
    assert (runner.mode, len(fake_capture), len(runner.calls)) == ("graph", 2, 1)
    assert runner.notes == ()
    runner.measure(FakeTimer(iter([12.0])))
    assert runner.times == [3.0]  # of each of the graph's four calls


def test_prefill_runs_without_a_graph(fake_capture: list[Any]) -> None:
    seen: list[bool] = []

    class Watching(FakeContender):
        def prepare(self, *rest: Any, is_captured: bool) -> Any:
            seen.append(is_captured)
            return super().prepare(*rest, is_captured=is_captured)

    prefill = workload((20,), (20,), phase=WorkloadPhase.PREFILL)
    timer = FakeTimer(count(1.0))
    runner = ready(Watching(), prefill, timer, SlowPathGuard(), num_copies=1, with_graph=True)
    assert (runner.mode, runner.notes, fake_capture, seen) == ("eager", (), [], [False])


def test_a_warm_graph_repeats_one_set_of_inputs(fake_capture: list[Any]) -> None:
    timer = FakeTimer(count(1.0), is_cold=False)
    ready(FakeContender(), workload(), timer, SlowPathGuard(), num_copies=2, with_graph=True)
    assert len(fake_capture) == 1


def test_what_may_not_be_captured_runs_without_and_says_so(fake_capture: list[Any]) -> None:
    runner = make_ready(FakeContender(graph_level=AttentionCGSupport.NEVER), with_graph=True)
    assert (runner.mode, fake_capture) == ("eager", [])
    assert runner.notes == ("FAKE ran without a graph: declares NEVER",)


def test_a_replay_that_computes_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def capture(calls: Sequence[Callable[[], Any]]) -> Replay:
        result = calls[0]()
        return Replay(call=lambda: None, count=1, result=result, graph=None)  # type: ignore[arg-type]

    monkeypatch.setattr(runners, "capture", capture)
    with pytest.raises(UnmeasuredError, match=r"FAKE \(replayed\) is not timed"):
        make_ready(FakeContender(), with_graph=True)


def test_the_device_of_the_timer_is_used() -> None:
    seen: list[torch.device] = []

    class Watching(FakeContender):
        def prepare(self, workload: Any, device: torch.device, *rest: Any, **more: Any) -> Any:
            seen.append(device)
            return super().prepare(workload, device, *rest, **more)

    make_ready(Watching())
    assert seen == [CPU]


def test_a_yardstick_need_not_attend() -> None:
    contender = FakeContender(after=lambda result: [], is_attention=False)
    assert make_ready(contender).name == "FAKE"
