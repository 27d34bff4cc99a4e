"""What a timer calls, how often and in which order; nothing here looks at a clock."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attn_bench_testing import CPU

from attn_bench import timing
from attn_bench.timing import CpuTimer, DeviceTimer, WallTimer, num_copies_for, timer_for

pytestmark = pytest.mark.usefixtures("small_limits")

DEVICE = torch.device("cuda:0")


class FakeModule:
    """Stands for torch.cuda: events count the calls between them."""

    def __init__(self, log: list[str]) -> None:
        self.log = log
        module = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing
                self.at = -1

            def record(self) -> None:
                self.at = module.log.count("call")

            def elapsed_time(self, other: Event) -> float:
                return 2.0 * (other.at - self.at)  # two milliseconds a call

        self.Event = Event

    def synchronize(self, device: Any = None) -> None:
        self.log.append("synchronize")

    def _sleep(self, cycles: int) -> None:
        self.log.append(f"sleep {cycles}")

    @staticmethod
    def get_device_properties(device: Any) -> Any:
        return SimpleNamespace(L2_cache_size=1000)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    module = FakeModule(found)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    return found


class FakeSweep:
    def __init__(self, log: list[str]) -> None:
        self.log = log

    def add_(self, value: float) -> None:
        self.log.append("flush")


def device_timer(log: list[str], *, is_cold: bool) -> DeviceTimer:
    timer = DeviceTimer.__new__(DeviceTimer)
    timer.device, timer.is_cold = DEVICE, is_cold
    timer._module = torch.get_device_module(DEVICE)
    timer._sweep = FakeSweep(log) if is_cold else None  # type: ignore[assignment]
    return timer


def test_the_cpu_is_flushed_before_one_cold_call() -> None:
    log: list[str] = []
    timer = CpuTimer(CPU, is_cold=True)
    timer._sweep = FakeSweep(log)  # type: ignore[assignment]
    assert timer.time_us([lambda: log.append("call")]) > 0
    assert log == ["flush", "call"]


def test_a_short_warm_call_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([0.0, 20e-6, 1.0, 1.0 + 300e-6])
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    log: list[str] = []
    timer = CpuTimer(CPU, is_cold=False)
    assert timer._sweep is None
    # once to warm up, once to see that it takes 20 us, ten times for 300 us in all
    assert timer.time_us([lambda: log.append("call")]) == pytest.approx(30.0)
    assert len(log) == 1 + 1 + 10


def test_on_a_cpu_the_host_does_all_of_the_work() -> None:
    timer = timer_for(CPU, is_cold=False)
    assert isinstance(timer, CpuTimer)
    assert timer.host_us([lambda: None]) is None
    assert timer.waits(lambda: None) is None


def test_a_plan_is_timed_to_the_end_and_then_some_in_a_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [0.0]
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    planned: list[int] = []

    def plan() -> None:
        planned.append(1)
        clock[0] += (50e-6, 20e-6)[len(planned) > 1]  # the first finds cold caches

    found = timer_for(CPU, is_cold=False).plan_us(plan)
    assert (found.host_us, found.done_us) == (pytest.approx(20.0), pytest.approx(50.0))
    assert len(planned) == 1 + 4


def test_cold_device_calls_take_the_copies_in_turn(log: list[str]) -> None:
    timer = device_timer(log, is_cold=True)
    order: list[int] = []

    def call(index: int) -> Any:
        return lambda: (order.append(index), log.append("call"))

    time_us = timer.time_us([call(0), call(1), call(2)], host_us=10.0)
    assert time_us == pytest.approx(2000.0)
    assert order == [0, 1, 2] * 3  # at least eight calls
    assert log[:2] == ["flush", f"sleep {int((1.5 * 90 + 100) * 2000)}"]
    assert log[-1] == "synchronize"


def test_warm_device_calls_repeat_the_first_copy(log: list[str]) -> None:
    timer = device_timer(log, is_cold=False)
    order: list[int] = []

    def call(index: int) -> Any:
        return lambda: (order.append(index), log.append("call"))

    assert timer.time_us([call(0), call(1)]) == pytest.approx(2000.0)
    assert order == [0] * 9  # one to warm up
    assert log[0] == "call"


def test_the_device_rests_from_what_was_timed_before(
    log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rests: list[float] = []
    monkeypatch.setattr(timing, "time", SimpleNamespace(sleep=rests.append))
    timer = device_timer(log, is_cold=True)
    for calls in (["call"], ["call"] * 24, ["call"]):
        timer.time_us([lambda entries=calls: log.extend(entries)])  # type: ignore[misc]
    # eight calls of two milliseconds, then eight times as many as a graph has
    assert rests == [pytest.approx(0.032), timing._LONGEST_REST_S]


def test_the_device_is_not_kept_busy_for_ever(log: list[str]) -> None:
    device_timer(log, is_cold=False).time_us([lambda: log.append("call")], host_us=1e9)
    assert "sleep 200000000" in log


def hosts_time(log: list[str], monkeypatch: pytest.MonkeyPatch, each_us: float) -> float:
    clock = [0.0]

    def call() -> None:
        log.append("call")
        clock[0] += each_us * 1e-6

    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    return device_timer(log, is_cold=True).host_us([call, call])


def test_the_hosts_time_is_taken_behind_a_busy_device(
    log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert hosts_time(log, monkeypatch, 10.0) == pytest.approx(10.0)
    # one that is not counted, four that are
    assert [entry.split()[0] for entry in log] == ["sleep", *["call"] * 5, "synchronize"]


def test_long_calls_do_not_fill_the_queue(log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert hosts_time(log, monkeypatch, 400.0) == pytest.approx(400.0)
    assert log.count("call") == 2


def test_a_graph_of_many_calls_is_replayed_once(log: list[str]) -> None:
    timer = device_timer(log, is_cold=True)
    replay = lambda: log.extend(["call"] * 24)  # noqa: E731
    assert timer.time_us([replay], 5.0, calls_each=24) == pytest.approx(2000.0)
    assert log.count("call") == 24


@pytest.mark.parametrize("waits", [True, False])
def test_a_plan_that_waits_is_found(
    log: list[str], monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    timer = device_timer(log, is_cold=True)
    modes: list[Any] = []
    monkeypatch.setattr(timer._module, "set_sync_debug_mode", modes.append, raising=False)
    monkeypatch.setattr(timer._module, "get_sync_debug_mode", lambda: 0, raising=False)

    def plan() -> None:
        assert modes == ["error"]
        if waits:
            raise RuntimeError("called a synchronizing CUDA operation")

    assert timer.waits(plan) is waits
    assert modes == ["error", 0]


def test_another_error_of_a_plan_is_raised(log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    timer = device_timer(log, is_cold=True)
    monkeypatch.setattr(timer._module, "set_sync_debug_mode", lambda mode: None, raising=False)
    monkeypatch.setattr(timer._module, "get_sync_debug_mode", lambda: 0, raising=False)

    def plan() -> None:
        raise RuntimeError("no such kernel")

    with pytest.raises(RuntimeError, match="no such kernel"):
        timer.waits(plan)


@pytest.mark.cuda
def test_torch_tells_of_a_synchronisation() -> None:
    timer = timer_for(torch.device("cuda"), is_cold=False)
    x = torch.ones(4, device="cuda")
    assert timer.waits(lambda: x.sum().item()) is True
    assert timer.waits(lambda: x + 1) is False


@pytest.mark.parametrize(
    ("working_set", "is_cold", "copies"),
    [(500, True, 6), (10_000, True, 2), (1, True, 48), (500, False, 1)],
)
def test_copies_pass_the_l2(log: list[str], working_set: int, is_cold: bool, copies: int) -> None:
    assert num_copies_for(DEVICE, working_set, is_cold=is_cold) == copies


def test_a_cpu_needs_one_copy() -> None:
    assert num_copies_for(CPU, 1, is_cold=True) == 1


def test_a_device_without_events_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    module = SimpleNamespace(synchronize=lambda: log.append("synchronize"))
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    device = torch.device("meta")
    timer = timer_for(device, is_cold=False)
    assert isinstance(timer, WallTimer)
    timer.time_us([lambda: log.append("call")])
    assert log[:2] == ["call", "synchronize"]
    assert log[-1] == "synchronize"


@pytest.mark.cuda
@pytest.mark.parametrize("is_cold", [True, False])
def test_events_of_a_real_device(is_cold: bool) -> None:
    timer = timer_for(torch.device("cuda"), is_cold=is_cold)
    x = torch.randn(512, 512, device="cuda")
    call = lambda: x @ x  # noqa: E731
    host_us = timer.host_us([call])
    assert host_us is not None
    assert timer.time_us([call, call], host_us) > 0
