from __future__ import annotations

import pytest
import torch
from attn_bench_testing import CPU, FakeTimer

from attn_bench.limits import LimitRunner, limit_bytes, machine_limits

pytestmark = pytest.mark.usefixtures("small_limits")


def test_what_is_read_and_multiplied_by_hand() -> None:
    read, matmul = machine_limits(CPU, torch.bfloat16)
    assert (read.name, read.amount) == ("read", 4096)
    assert (matmul.name, matmul.amount) == ("matmul", 2 * 16**3)
    read.warm_up()
    matmul.warm_up()
    assert limit_bytes(CPU, torch.bfloat16) == 4096 + 3 * 16 * 16 * 2 + 16 * 16 * 4


def test_rates_are_per_second() -> None:
    limit = LimitRunner("read", lambda: None, 3_000_000, 1e9)
    timer = FakeTimer(iter([1000.0, 500.0]))
    limit.measure(timer)
    limit.measure(timer)
    assert limit.rates == [3.0, 6.0]  # 3 MB in a millisecond are 3 GB/s
    assert limit.fresh().times == []
    assert len(limit.times) == 2
