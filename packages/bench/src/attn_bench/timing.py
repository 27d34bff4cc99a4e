"""Timing one call on a CPU, a CUDA device, or what triton knows."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch

__all__ = ["CpuTimer", "DeviceTimer", "Timer", "timer_for"]

Call = Callable[[], object]

_FLUSH_BYTES = {"cpu": 400 * 2**20}  # past a shared last-level cache of a few hundred MiB
_FLUSH_BYTES_ELSEWHERE = 256 * 2**20  # past every L2 there is today
_EVENT_RESOLUTION_US = 0.5
_LEAST_US = 200.0  # a measurement shorter than this is made of several calls


class Timer(ABC):
    """Times calls; "cold" with caches flushed before each, "warm" right after the same call."""

    def __init__(self, device: torch.device, *, is_cold: bool) -> None:
        """Prepare what flushes caches."""
        self.device = device
        self.is_cold = is_cold
        num_bytes = _FLUSH_BYTES.get(device.type, _FLUSH_BYTES_ELSEWHERE)
        self._sweep = torch.zeros(num_bytes // 4, device=device) if is_cold else None

    def _flush(self) -> None:
        if self._sweep is not None:
            self._sweep.add_(1.0)

    @abstractmethod
    def time_us(self, calls: Sequence[Call]) -> float:
        """Return the time of one call in microseconds; several calls are taken in turn."""

    @abstractmethod
    def host_us(self, call: Call) -> float | None:
        """Return the host's time to issue a call, or None where that is the whole time."""


class CpuTimer(Timer):
    """Wall-clock time of a call."""

    def time_us(self, calls: Sequence[Call]) -> float:
        """Time the first call alone when cold; when warm, repeat until it is long enough."""
        call = calls[0]
        if self.is_cold:
            self._flush()
            return _elapsed_us(call)
        call()
        once = _elapsed_us(call)
        repeats = max(1, int(_LEAST_US / max(once, 1.0)))
        if repeats == 1:
            return once
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        return (time.perf_counter() - start) * 1e6 / repeats

    def host_us(self, call: Call) -> float | None:
        """Return None: on a CPU the host does all of it."""
        return None


def _elapsed_us(call: Call) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e6


class DeviceTimer(Timer):
    """Device time between events, over calls queued without a gap.

    Rotating over copies of the inputs that together pass the L2 makes each call cold without a
    flush between them, as the inputs of a served model are.
    """

    def __init__(self, device: torch.device, *, is_cold: bool) -> None:
        """Prepare events of the device."""
        super().__init__(device, is_cold=is_cold)
        self._module = torch.get_device_module(device)

    def time_us(self, calls: Sequence[Call]) -> float:
        """Queue enough calls behind a busy device that the host is never waited for."""
        rotation = list(calls) if self.is_cold else [calls[0]]
        repeats = max(1, 8 // len(rotation))
        start = self._module.Event(enable_timing=True)
        stop = self._module.Event(enable_timing=True)
        self._flush()
        self._occupy()
        start.record()
        for _ in range(repeats):
            for call in rotation:
                call()
        stop.record()
        self._module.synchronize(self.device)
        return float(start.elapsed_time(stop)) * 1e3 / (repeats * len(rotation))

    def host_us(self, call: Call) -> float | None:
        """Return the host's time to issue one call behind a busy device, the least of five."""
        found = []
        for _ in range(5):
            self._occupy()
            found.append(_elapsed_us(call))
            self._module.synchronize(self.device)
        return min(found)

    def _occupy(self) -> None:
        """Keep the device busy while the host queues what is timed."""
        sleep = getattr(self._module, "_sleep", None)
        if sleep is not None:
            sleep(20_000_000)  # cycles: about 10 ms, more than the host needs for eight calls
        elif self._sweep is not None:
            self._sweep.add_(1.0)


def timer_for(device: torch.device, *, is_cold: bool) -> Timer:
    """Return the timer of a device."""
    if device.type == "cpu":
        return CpuTimer(device, is_cold=is_cold)
    return DeviceTimer(device, is_cold=is_cold)
