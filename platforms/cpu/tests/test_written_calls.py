"""`write_and_attend` on drawn batches: bit for bit `write_kv`, then `attention_cached`.

Keys and values come in every layout that callers have: rows with gaps, heads first, one row for all
tokens, and rows of the cache that is written.
"""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from attn_cpu_testing import attention_arguments, cached_arguments, levels, needs_kernels, plan_of
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from test_cpu_attn import Step
from torch import Tensor

from attn_cpu.isa import level_named

pytestmark = needs_kernels

HEADS, KV_HEADS = 4, 2
STORED = (
    *((dtype, dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)),
    (torch.bfloat16, torch.float8_e4m3fn),
    (torch.float16, torch.float8_e5m2),
    (torch.float32, torch.float8_e4m3fn),
)
LAYOUTS = ("dense", "gaps", "heads_first", "one_row", "packed", "of_the_cache")


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A drawn call; lengths are (queries, keys) of each request."""

    lengths: tuple[tuple[int, int], ...] = ((1, 13), (3, 9))
    dtypes: tuple[torch.dtype, torch.dtype] = STORED[0]
    layout: str = "dense"
    size: int = 32
    block_size: int = 8
    window: tuple[int | None, int | None] = (None, None)
    softcap: float = 0.0
    scales: tuple[float, float] = (1.0, 1.0)
    is_heads_first: bool = False
    num_unwritten: int = 0
    is_slot_twice: bool = False
    rows_more: int = 0
    level: str = "generic"

    @property
    def num_tokens(self) -> int:
        return sum(queries for queries, _ in self.lengths)

    @property
    def num_blocks(self) -> int:
        return sum(-(-keys // self.block_size) for _, keys in self.lengths) + 2


@dataclass(kw_only=True)
class Made:
    """The arguments of a batch, over a cache of its own."""

    batch: Batch
    cached: dict[str, Any] = field(default_factory=dict)
    rows: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.cached = self._cached()
        self.rows = {
            "key": self._rows(0),
            "value": self._rows(1),
            "slot_mapping": self._slots(self.cached["block_table"]),
        }

    def _randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.batch.dtypes[0])

    def _cached(self) -> dict[str, Any]:
        batch, (dtype, stored) = self.batch, self.batch.dtypes
        counts = [-(-keys // batch.block_size) for _, keys in batch.lengths]
        blocks = iter(torch.randperm(batch.num_blocks, generator=self.generator).tolist())
        table = [list(itertools.islice(blocks, n)) for n in counts]
        table = [row + [0] * (max(counts) - len(row)) for row in table]
        query = self._randn(batch.num_tokens, HEADS, batch.size)
        pair = [
            self._randn(batch.num_blocks, batch.block_size, KV_HEADS, batch.size).to(stored)
            for _ in range(2)
        ]
        if batch.is_heads_first:
            pair = [each.transpose(1, 2).contiguous().transpose(1, 2) for each in pair]
        starts = torch.tensor([0, *(queries for queries, _ in batch.lengths)]).cumsum(0).int()
        arguments = attention_arguments(dtype, lse=None) | {
            "query": query,
            "out": torch.zeros_like(query),
            "key": pair[0],
            "value": pair[1],
            "block_table": torch.tensor(table, dtype=torch.int32),
            "query_start_loc": starts,
            "seq_lens": torch.tensor([keys for _, keys in batch.lengths], dtype=torch.int32),
            "window_left": batch.window[0],
            "window_right": batch.window[1],
            "scale": batch.size**-0.5,
            "isa": level_named(batch.level),
        }
        arguments["plan"] = plan_of(arguments)
        made = cached_arguments(arguments, batch.softcap, batch.scales)
        del made["new_key"], made["new_value"]
        return made

    def _rows(self, which: int) -> Tensor:
        batch, cache = self.batch, self.cached["kv_cache"]
        num_rows = batch.num_tokens + batch.rows_more
        if batch.layout == "of_the_cache":
            flat: Tensor = cache[:, which, 0]  # (blocks, Hkv, D): a row of each block, over again
            return flat[:num_rows]
        if batch.layout == "gaps":
            return self._randn(2 * num_rows, KV_HEADS + 1, batch.size)[::2, 1:]
        if batch.layout == "heads_first":
            return self._randn(KV_HEADS, num_rows, batch.size).transpose(0, 1)
        if batch.layout == "one_row":
            return self._randn(1, KV_HEADS, batch.size).expand(num_rows, -1, -1)
        if batch.layout == "packed":
            packed = self._randn(num_rows, HEADS + 2 * KV_HEADS, batch.size)
            start = HEADS + which * KV_HEADS
            return packed[:, start : start + KV_HEADS]
        return self._randn(num_rows, KV_HEADS, batch.size)

    def _slots(self, table: Tensor) -> Tensor:
        size = self.batch.block_size
        slots = [
            int(row[place // size]) * size + place % size
            for row, (queries, keys) in zip(table, self.batch.lengths, strict=True)
            for place in range(keys - queries, keys)
        ]
        for index in range(self.batch.num_unwritten):
            slots[(7 * index) % len(slots)] = -1
        if self.batch.is_slot_twice:
            slots[0] = slots[-1]
        return torch.tensor(slots)

    def in_one(self) -> tuple[Tensor, Tensor]:
        torch.ops.attn_cpu.write_and_attend(**self.cached, **self.rows)
        return self.cached["out"], self.cached["kv_cache"]

    def in_two(self) -> tuple[Tensor, Tensor]:
        cache = self.cached["kv_cache"]
        is_fp8 = cache.dtype.itemsize == 1
        scales = [torch.tensor([scale]) if is_fp8 else None for scale in self.batch.scales]
        rows = self.rows["key"], self.rows["value"], *cache.unbind(1), self.rows["slot_mapping"]
        torch.ops.attn_cpu.write_kv(*rows, *scales, None, None, True)
        torch.ops.attn_cpu.attention_cached(**self.cached, new_key=None, new_value=None)
        return self.cached["out"], cache


def same(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> bool:
    return all(
        torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        for a, b in zip(found, expected, strict=True)
    )


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    queries = st.sampled_from([1, 1, 1, 2, 5, 40])
    lengths = []
    for _ in range(draw(st.integers(1, 4))):
        count = draw(queries)
        lengths.append((count, count + draw(st.integers(0, 30))))
    total = sum(count for count, _ in lengths)
    dtypes = draw(st.sampled_from(STORED))
    layout = draw(st.sampled_from(LAYOUTS))
    if layout == "of_the_cache" and (total > 3 or dtypes[0] is not dtypes[1]):
        layout = "gaps"
    is_fp8 = dtypes[0] is not dtypes[1]
    return Batch(
        lengths=tuple(lengths),
        dtypes=dtypes,
        layout=layout,
        size=draw(st.sampled_from([32, 40, 64])),
        block_size=draw(st.sampled_from([8, 16])),
        window=draw(st.sampled_from([(None, None), (7, 0), (0, 0), (3, 2)])),
        softcap=draw(st.sampled_from([0.0, 3.0])),
        scales=draw(st.sampled_from([(0.5, 3.0), (2.0, 0.25)])) if is_fp8 else (1.0, 1.0),
        is_heads_first=draw(st.booleans()),
        num_unwritten=draw(st.integers(0, 3)),
        is_slot_twice=total <= 32 and draw(st.booleans()),  # more are written by several threads
        rows_more=0 if layout == "of_the_cache" else draw(st.integers(0, 2)),
        level=draw(st.sampled_from(levels() or ["generic"])),
    )


SLOW = [HealthCheck.too_slow]


@settings(max_examples=150, deadline=None, suppress_health_check=SLOW)
@given(batch=batches())
@example(batch=Batch(layout="of_the_cache", lengths=((3, 20),), is_slot_twice=True))
def test_it_is_the_two_ops_on_any_batch(batch: Batch) -> None:
    one, two = Made(batch=batch), Made(batch=batch)
    before = one.cached["kv_cache"].clone()
    found, expected = one.in_one(), two.in_two()
    assert same(found, expected)
    changed = (found[1].view(torch.uint8) != before.view(torch.uint8)).flatten(3).any(-1)
    slots = one.rows["slot_mapping"]
    named = torch.zeros(batch.num_blocks * batch.block_size, dtype=torch.bool)
    named[slots[slots >= 0]] = True
    assert not changed.transpose(0, 1).flatten(1)[:, ~named].any()


def test_inference_tensors_and_modes() -> None:
    expected = Made(batch=Batch()).in_two()
    with torch.inference_mode():
        inside = Made(batch=Batch())
        assert same(inside.in_one(), expected)
    outside = Made(batch=Batch())
    with torch.inference_mode():
        assert same(outside.in_one(), expected)
    with torch.no_grad():
        assert same(Made(batch=Batch()).in_one(), expected)


def test_a_compiled_graph_calls_it() -> None:
    expected = Made(batch=Batch()).in_two()
    made = Made(batch=Batch())

    def call(query: Tensor, out: Tensor, kv_cache: Tensor, key: Tensor, value: Tensor) -> Tensor:
        own = {"query": query * 1, "out": out, "kv_cache": kv_cache, "key": key, "value": value}
        torch.ops.attn_cpu.write_and_attend(**(made.cached | made.rows | own))
        return out + 0

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    states = (made.cached[name] for name in ("query", "out", "kv_cache"))
    found = compiled(*states, made.rows["key"], made.rows["value"])
    assert same((found, made.cached["kv_cache"]), expected)
    assert same((made.cached["out"], made.cached["kv_cache"]), expected)


def test_several_threads_at_once() -> None:
    batches = [Batch(lengths=((1, n), (4, 30 + n))) for n in range(1, 9)]
    expected = [Made(batch=batch).in_two() for batch in batches]
    size = 1 << 20
    workspace = torch.zeros(size, dtype=torch.uint8)  # one for all, as layers share it

    def run(batch: Batch) -> tuple[Tensor, Tensor]:
        for _ in range(20):
            made = Made(batch=batch)
            made.cached["workspace"] = workspace
            found = made.in_one()
        return found

    with ThreadPoolExecutor(4) as threads:
        assert all(map(same, threads.map(run, batches), expected))


@pytest.mark.parametrize(
    "options",
    [
        {"sinks": torch.linspace(-1, 1, 6)},
        {"alibi_slopes": torch.linspace(0.1, 0.6, 6)},
        {"dtype": torch.bfloat16, "kv_cache_dtype": "int8_per_token_head"},
        {"window": (5, 0), "softcap": 2.0},
    ],
    ids=["sinks", "alibi", "int8", "window"],
)
def test_a_layer_of_any_kind_writes_and_attends_twice_alike(options: dict[str, Any]) -> None:
    step = Step([33, 20], [1, 4], **options)
    rows = torch.randn(2, 5, 2, 64, generator=torch.Generator().manual_seed(2))
    key, value = rows.to(step.query.dtype)
    slots = step.common.slot_mapping
    assert slots is not None
    other = step.cache.clone()
    step.layer.impl.do_kv_cache_update(step.layer, key, value, other, slots)
    plan = step.layer.plan(step.common)
    expected = step.layer.forward(step.query, None, None, other, plan).clone()
    for _ in range(2):  # the first finds out whether the short way serves
        found = step.layer.forward(step.query, key, value, step.cache, plan)
        assert same((found, step.cache), (expected, other))
