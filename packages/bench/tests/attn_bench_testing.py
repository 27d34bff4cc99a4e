"""Small workloads, contenders that do what a test wants, a timer that says what it wants."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from attn_bench.contenders import Contender, Prepared
from attn_bench.peers import SdpaContender
from attn_bench.results import Cell, Limits, Machine, Rate, Results, Settings
from attn_bench.timing import Call, PlanTime, Timer
from attn_bench.workloads import Heads, Workload, WorkloadPhase

CPU = torch.device("cpu")
HEADS = Heads(num_heads=4, num_kv_heads=2, head_size=8)


def workload(
    query_lens: Sequence[int] = (1, 1), seq_lens: Sequence[int] = (5, 9), **fields: Any
) -> Workload:
    """Return a batch of a small float32 layer."""
    plain = {"phase": WorkloadPhase.DECODE, "heads": HEADS, "dtype": torch.float32}
    plain |= {"block_size": 4}
    return Workload(query_lens=tuple(query_lens), seq_lens=tuple(seq_lens), **(plain | fields))


class FakeTimer(Timer):
    """Says that calls take the times that it is given, in turn; runs the first call."""

    def __init__(self, times_us: Iterator[float], *, is_cold: bool = True) -> None:
        self.device = CPU
        self.is_cold = is_cold
        self._times = times_us

    def synchronize(self) -> None:
        pass

    def time_us(
        self, calls: Sequence[Call], host_us: float | None = None, *, calls_each: int = 1
    ) -> float:
        calls[0]()
        return next(self._times) / calls_each

    def plan_us(self, plan: Call) -> PlanTime:
        plan()
        return PlanTime(host_us=3.0, done_us=7.0)


class FakeContender(Contender):
    """Runs torch's SDPA, after doing what a test wants."""

    def __init__(
        self,
        name: str = "FAKE",
        before: Callable[[], None] = lambda: None,
        after: Callable[[list[torch.Tensor]], list[torch.Tensor]] = lambda result: result,
        **prepared: Any,
    ) -> None:
        self.name = name
        self.num_calls = 0
        self._before, self._after, self._prepared = before, after, prepared

    def prepare(
        self, workload: Workload, device: torch.device, num_copies: int, *, is_captured: bool
    ) -> Prepared:
        plain = SdpaContender().prepare(workload, device, num_copies, is_captured=is_captured)
        copies = tuple(replace(copy, call=self._wrapped(copy.call)) for copy in plain.copies)
        return replace(plain, name=self.name, copies=copies, notes=(), **self._prepared)

    def _wrapped(self, call: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            self.num_calls += 1
            self._before()
            return self._after(call())

        return run


CELL = Cell(
    backend="TORCH_SDPA",
    peer="torch.sdpa",
    phase="decode",
    label="8x1024",
    batch=8,
    context=1024,
    query_len=1,
    num_heads=32,
    num_kv_heads=8,
    head_size=128,
    dtype="bfloat16",
    kv_cache_dtype="auto",
    block_size=16,
    shared_prefix_len=0,
    time_us=1234.0,
    interval_us=(1200.0, 1300.0),
    peer_time_us=2000.0,
    peer_interval_us=(1900.0, 2100.0),
    ratio=0.62,
    ratio_interval=(0.6, 0.65),
    gb_per_s=27.3,
    tflop_per_s=0.109,
    share_of_read=0.85,
    share_of_matmul=0.07,
    host_us=None,
    plan_us=50.0,
    cache_state="cold",
    mode="eager",
    peer_mode="eager",
    rounds=15,
    notes=("keys lie dense",),
)

RESULTS = Results(
    date="2026-11-18T10:00:00Z",
    machine=Machine(
        name="Some CPU",
        arch="x86_64",
        compute_units=2,
        memory_bytes=8 * 2**30,
        threads=2,
        driver="Linux 6.1",
        isa=("avx2",),
        notes=("other work ran beside",),
    ),
    versions={"attn": "0.1.0", "torch": "2.13.0", "python": "3.11.7"},
    settings=Settings(),
    limits=Limits(
        read_gb_per_s=Rate(median=32.0, interval=(31.0, 33.0)),
        matmul_tflop_per_s={"bfloat16": Rate(median=1.6, interval=(1.5, 1.7))},
    ),
    cells=(CELL,),
)
