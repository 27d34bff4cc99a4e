"""Timing one call: wall-clock on a CPU, events and graph replay on a device.

Events are what every torch device module offers that knows time (CUDA, ROCm, XPU); triton's
do_bench is built on the same events, so that it would add a dependency and no device. Any other
device is timed by wall-clock around a synchronisation.
"""

from __future__ import annotations

import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = [
    "Call",
    "CpuTimer",
    "DeviceTimer",
    "PlanTime",
    "Timer",
    "WallTimer",
    "num_copies_for",
    "timer_for",
]

Call = Callable[[], object]

_FLUSH_BYTES = {"cpu": 400 * 2**20}  # past a shared last-level cache of a few hundred MiB
_FLUSH_BYTES_ELSEWHERE = 512 * 2**20  # past every L2, and every cache beside memory, of today
_LEAST_US = 200.0  # a warm measurement shorter than this is made of several calls
_LEAST_CALLS = 8  # between two events
_HOST_CALLS = 4  # whose issuing is timed together
_HOST_BUSY_US = 1_000.0
_HOST_LONG_US = 300.0  # of issuing; then no further call
_MOST_COPIES = 48
_DEFAULT_L2_BYTES = 128 * 2**20  # where the device does not say
_L2_PASSES = 2  # copies hold this many times the L2, so that each call finds none of its inputs
_MOST_SLEEP_CYCLES = 200_000_000  # about 0.1 s
_CYCLES_PER_US = 2_000  # of any of today's clocks, or more
_REST = 2.0  # times what the measurement before took, so that a power limit is not met
_LONGEST_REST_S = 0.1


def num_copies_for(device: torch.device, working_set_bytes: int, *, is_cold: bool) -> int:
    """Return how many sets of inputs are rotated so that none is left in the L2.

    A CPU's caches are flushed instead; so are those of devices that are timed by wall-clock.
    """
    if not is_cold or not _has_events(device):
        return 1
    wanted = _L2_PASSES * _l2_bytes(device) // max(1, working_set_bytes) + 2
    return min(_MOST_COPIES, wanted)


def _has_events(device: torch.device) -> bool:
    return device.type != "cpu" and hasattr(torch.get_device_module(device), "Event")


def _l2_bytes(device: torch.device) -> int:
    properties = torch.get_device_module(device).get_device_properties(device)
    return int(getattr(properties, "L2_cache_size", 0) or _DEFAULT_L2_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanTime:
    """Microseconds of the host's work of a step.

    Attributes:
        host_us: until the host may go on; of a few in a row, as issuing a call is timed.
        done_us: until the device has done its part as well; of one alone.
    """

    host_us: float
    done_us: float


class Timer(ABC):
    """Times calls; "cold" with inputs in no cache, "warm" right after the same call."""

    def __init__(self, device: torch.device, *, is_cold: bool) -> None:
        """Prepare what flushes caches."""
        self.device = device
        self.is_cold = is_cold
        self._sweep = torch.zeros(self.sweep_bytes(device) // 4, device=device) if is_cold else None

    @staticmethod
    def sweep_bytes(device: torch.device) -> int:
        """Return the memory that flushing takes."""
        return _FLUSH_BYTES.get(device.type, _FLUSH_BYTES_ELSEWHERE)

    def _flush(self) -> None:
        if self._sweep is not None:
            self._sweep.add_(1.0)

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the device has done what was asked of it."""

    @abstractmethod
    def time_us(
        self, calls: Sequence[Call], host_us: float | None = None, *, calls_each: int = 1
    ) -> float:
        """Return the time of one call in microseconds.

        Args:
            calls: one per set of inputs; a cold timer that rotates takes them in turn, any other
                takes the first.
            host_us: the host's time to issue one, as `host_us` found it.
            calls_each: how many calls each of them makes: those of a graph.
        """

    def host_us(self, calls: Sequence[Call]) -> float | None:
        """Return the host's time to issue a call; None where that is the whole time."""
        return None

    def plan_us(self, plan: Call) -> PlanTime:
        """Time the host's work of a step on an idle device: once to the end, then some in a row."""
        self.synchronize()
        start = time.perf_counter()
        plan()
        self.synchronize()
        done_us = (time.perf_counter() - start) * 1e6
        host_us = _in_a_row([plan])
        self.synchronize()
        return PlanTime(host_us=host_us, done_us=done_us)

    def waits(self, plan: Call) -> bool | None:
        """Return whether a plan makes the host wait for the device; None where nobody can tell."""
        return None


def _elapsed_us(call: Call) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e6


def _in_a_row(calls: Sequence[Call]) -> float:
    """Return the time of a call among a few in a row; long ones are not repeated."""
    spent = 0.0
    for count in range(1, _HOST_CALLS + 1):
        spent += _elapsed_us(calls[count % len(calls)])
        if spent > _HOST_LONG_US:
            break
    return spent / count


class CpuTimer(Timer):
    """Wall-clock time of a call: alone when cold, repeated until long enough when warm."""

    def synchronize(self) -> None:
        """Return at once: a CPU has done what was asked of it."""

    def time_us(
        self, calls: Sequence[Call], host_us: float | None = None, *, calls_each: int = 1
    ) -> float:
        """Time the first call."""
        call = calls[0]
        if self.is_cold:
            self._flush()
            return _elapsed_us(call) / calls_each
        call()
        once = _elapsed_us(call)
        repeats = int(_LEAST_US / max(once, 1.0))
        if repeats <= 1:
            return once / calls_each
        return _elapsed_us(_repeated(call, repeats)) / repeats / calls_each


def _repeated(call: Call, count: int) -> Call:
    def run() -> None:
        for _ in range(count):
            call()

    return run


class WallTimer(CpuTimer):
    """Wall-clock time of a call and of waiting for the device, one call at a time."""

    def synchronize(self) -> None:
        """Wait for the device."""
        torch.get_device_module(self.device).synchronize()

    def time_us(
        self, calls: Sequence[Call], host_us: float | None = None, *, calls_each: int = 1
    ) -> float:
        """Time the first call."""
        return super().time_us([self._waited(calls[0])], calls_each=calls_each)

    def _flush(self) -> None:
        super()._flush()
        self.synchronize()

    def _waited(self, call: Call) -> Call:
        def run() -> None:
            call()
            self.synchronize()

        return run


class DeviceTimer(Timer):
    """Device time between two events, over calls that are queued while the device is kept busy.

    Rotating over inputs that together pass the L2 makes each call cold without a flush between
    calls, as those of a model's layers are. Where the host issues a call more slowly than the
    device runs it, the time is the host's: a graph shows the device's.

    A device at its power limit lowers its clock, tens of milliseconds after what drew the power: a
    call would be timed at the clock that its predecessor in the round left (FlashAttention 3 on an
    H200: 593 TFLOP/s after itself, 635 after a kernel that draws less). So the device rests before
    each measurement, and all are taken at its full clock.
    """

    _busy_s = 0.0  # that the measurement before took

    def __init__(self, device: torch.device, *, is_cold: bool) -> None:
        """Look up the device's events."""
        super().__init__(device, is_cold=is_cold)
        self._module: Any = torch.get_device_module(device)

    def synchronize(self) -> None:
        """Wait for the device."""
        self._module.synchronize(self.device)

    def time_us(
        self, calls: Sequence[Call], host_us: float | None = None, *, calls_each: int = 1
    ) -> float:
        """Time some calls and divide."""
        rotation = list(calls) if self.is_cold else [calls[0]]
        repeats = -(-_LEAST_CALLS // (len(rotation) * calls_each))
        count = repeats * len(rotation)
        start = self._module.Event(enable_timing=True)
        stop = self._module.Event(enable_timing=True)
        self._rest()
        if self.is_cold:
            self._flush()
        else:
            rotation[0]()
        self._occupy(count * (host_us or 0.0))
        start.record()
        for _ in range(repeats):
            for call in rotation:
                call()
        stop.record()
        self.synchronize()
        elapsed_ms = float(start.elapsed_time(stop))
        self._busy_s = elapsed_ms * 1e-3
        return elapsed_ms * 1e3 / (count * calls_each)

    def host_us(self, calls: Sequence[Call]) -> float:
        """Return the host's time to issue one call behind a busy device, its queue not full.

        The first call is not counted; then some are, as long as they are short: a call of
        hundreds of launches would fill the queue, and be timed at the device's pace.
        """
        self._occupy(_HOST_BUSY_US)
        calls[0]()
        host_us = _in_a_row(calls)
        self.synchronize()
        return host_us

    def waits(self, plan: Call) -> bool | None:
        """Run the plan where torch raises an error for each synchronisation that it sees.

        What a library does without torch's knowledge is not seen.
        """
        set_mode = getattr(self._module, "set_sync_debug_mode", None)
        if set_mode is None:
            return None
        before = self._module.get_sync_debug_mode()
        try:
            with warnings.catch_warnings():  # it says that it is a prototype
                warnings.simplefilter("ignore")
                set_mode("error")
            plan()
        except RuntimeError as error:
            if "synchroniz" not in str(error):
                raise
            return True
        finally:
            set_mode(before)
        return False

    def _rest(self) -> None:
        """Wait until the power that the last measurement drew no longer counts."""
        if self._busy_s:
            time.sleep(min(_LONGEST_REST_S, _REST * self._busy_s))

    def _occupy(self, host_us: float) -> None:
        """Keep the device busy while the host queues what takes it so long."""
        sleep = getattr(self._module, "_sleep", None)
        if sleep is not None:
            cycles = int((1.5 * host_us + 100.0) * _CYCLES_PER_US)
            sleep(min(_MOST_SLEEP_CYCLES, cycles))
        elif self._sweep is not None:
            self._flush()


def timer_for(device: torch.device, *, is_cold: bool) -> Timer:
    """Return the timer of a device."""
    if device.type == "cpu":
        return CpuTimer(device, is_cold=is_cold)
    kind = DeviceTimer if _has_events(device) else WallTimer
    return kind(device, is_cold=is_cold)
