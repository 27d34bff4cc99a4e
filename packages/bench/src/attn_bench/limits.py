"""What the machine can do, measured in the same rounds as the contenders."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

__all__ = ["LIMIT_NAMES", "Limit", "machine_limits"]

_READ_BYTES = {"cpu": 256 * 2**20}
_READ_BYTES_ELSEWHERE = 2 * 2**30
_MATMUL_SIZE = {"cpu": 2048}
_MATMUL_SIZE_ELSEWHERE = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A call whose rate is a ceiling.

    Attributes:
        name: "read" or "matmul".
        call: what is timed.
        amount: bytes or operations of one call.
    """

    name: str
    call: Callable[[], object]
    amount: int

    def rate(self, time_us: float) -> float:
        """Return 1e9 bytes, or 1e12 operations, per second."""
        unit = 1e9 if self.name == "read" else 1e12
        return self.amount / (time_us * 1e-6) / unit


LIMIT_NAMES = ("read", "matmul")


def machine_limits(device: torch.device, dtype: torch.dtype) -> tuple[Limit, Limit]:
    """Return a reduction over memory that no cache holds, and a matrix product in `dtype`."""
    num_bytes = _READ_BYTES.get(device.type, _READ_BYTES_ELSEWHERE)
    buffer = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    size = _MATMUL_SIZE.get(device.type, _MATMUL_SIZE_ELSEWHERE)
    generator = torch.Generator(device).manual_seed(0)
    left, right = (
        torch.randn(size, size, generator=generator, device=device).to(dtype) for _ in range(2)
    )
    product = torch.empty(size, size, dtype=dtype, device=device)
    return (
        Limit(name="read", call=buffer.sum, amount=num_bytes),
        Limit(
            name="matmul",
            call=lambda: torch.mm(left, right, out=product),
            amount=2 * size**3,
        ),
    )
