"""What the machine can do, measured in the same rounds as the contenders."""

from __future__ import annotations

import torch

from attn_bench.timing import Call, Timer

__all__ = ["LimitRunner", "limit_bytes", "machine_limits"]

_READ_BYTES = {"cpu": 256 * 2**20}
_READ_BYTES_ELSEWHERE = 2 * 2**30
_MATMUL_SIZE = {"cpu": 2048}
_MATMUL_SIZE_ELSEWHERE = 8192


class LimitRunner:
    """A call whose rate is a ceiling, timed as contenders are.

    Attributes:
        name: "read" or "matmul".
        amount: bytes or operations of one call.
        times: microseconds of a call, one measurement per round.
    """

    def __init__(self, name: str, call: Call, amount: int, unit: float) -> None:
        """Take the call, and what its rate is counted in per second."""
        self.name = name
        self.amount = amount
        self.times: list[float] = []
        self._call = call
        self._unit = unit

    def warm_up(self) -> None:
        """Run once."""
        self._call()

    def measure(self, timer: Timer) -> None:
        """Take one measurement."""
        self.times.append(timer.time_us([self._call]))

    def fresh(self) -> LimitRunner:
        """Return the same call with nothing measured."""
        return LimitRunner(self.name, self._call, self.amount, self._unit)

    @property
    def rates(self) -> list[float]:
        """GB/s, or TFLOP/s, of each round."""
        return [self.amount / (time_us * 1e-6) / self._unit for time_us in self.times]


def limit_bytes(device: torch.device, dtype: torch.dtype) -> int:
    """Return the memory that `machine_limits` takes."""
    size = _MATMUL_SIZE.get(device.type, _MATMUL_SIZE_ELSEWHERE)
    read = _READ_BYTES.get(device.type, _READ_BYTES_ELSEWHERE)
    return read + size**2 * (3 * dtype.itemsize + 4)


def machine_limits(device: torch.device, dtype: torch.dtype) -> tuple[LimitRunner, LimitRunner]:
    """Return a reduction over memory that no cache holds, and a matrix product in `dtype`.

    Both over random numbers: on some devices zeros and ones are multiplied faster.
    """
    num_bytes = _READ_BYTES.get(device.type, _READ_BYTES_ELSEWHERE)
    generator = torch.Generator(device).manual_seed(0)
    buffer = torch.rand(num_bytes // 4, generator=generator, device=device)
    size = _MATMUL_SIZE.get(device.type, _MATMUL_SIZE_ELSEWHERE)
    left, right = (
        torch.randn(size, size, generator=generator, device=device).to(dtype) for _ in range(2)
    )
    product = torch.empty(size, size, dtype=dtype, device=device)
    return (
        LimitRunner("read", buffer.sum, num_bytes, 1e9),
        LimitRunner("matmul", lambda: torch.mm(left, right, out=product), 2 * size**3, 1e12),
    )
