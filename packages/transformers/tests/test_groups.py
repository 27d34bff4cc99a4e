"""A group's passes: begun by its first layer, shared by the others."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from dataclasses import replace
from math import nan
from mmap import mmap
from pathlib import Path
from typing import Any

import pytest
import torch

from attn_shared.errors import InvalidInputError
from attn_shared.layer import Attention
from attn_shared.selection import Policy
from attn_transformers import zero_pages
from attn_transformers.groups import LayerGroup
from attn_transformers.layers import LayerKey
from attn_transformers.masks import attention_mask, step_of
from attn_transformers.turns import Turn
from attn_transformers.zero_pages import ZeroPages

KEY = LayerKey(
    policy=Policy(),
    is_checked=True,
    device=torch.device("cpu"),
    dtype=torch.float32,
    num_heads=2,
    num_kv_heads=2,
    head_size=8,
    head_size_v=8,
    scale=1.0,
    window=(None, None),
    softcap=None,
    has_sinks=False,
    is_causal=True,
    block_size=4,
)


def group_of_two() -> tuple[LayerGroup, Attention]:
    attention = KEY.build(None)
    return LayerGroup(KEY, attention, None), attention


def turn(group: LayerGroup, attention: Attention, start: int, count: int) -> Turn:
    return group.turn(attention, None, 2, start, count, keeps_past=False)


def test_layers_share_a_pass() -> None:
    group, attention = group_of_two()
    first = turn(group, attention, 0, 5)
    assert turn(group, attention, 0, 5) is first
    assert group.num_places == 5
    second = turn(group, attention, 5, 1)
    assert second is not first
    assert second.plan is not None
    assert second.plan.common.seq_lens.tolist() == [6, 6]


def test_slots_follow_the_table() -> None:
    group, attention = group_of_two()
    plan = turn(group, attention, 0, 5).plan
    assert plan is not None
    table, slots = plan.common.block_table, plan.common.slot_mapping
    assert table is not None
    assert slots is not None
    expected = [int(table[row, p // 4]) * 4 + p % 4 for row in range(2) for p in range(5)]
    assert slots.tolist() == expected


def test_layers_that_saw_other_tokens() -> None:
    group, attention = group_of_two()
    turn(group, attention, 0, 5)
    with pytest.raises(InvalidInputError, match="tokens in the cache is 3; allowed: 5"):
        turn(group, attention, 3, 2)


def test_a_mask_of_another_length() -> None:
    group, attention = group_of_two()
    step = step_of(attention_mask(batch_size=2, q_length=3, kv_length=3))
    with pytest.raises(InvalidInputError, match="places of the mask"):
        group.turn(attention, step, 2, 0, 4, keeps_past=False)


def test_a_pass_of_padding_alone_has_no_plan() -> None:
    group, attention = group_of_two()
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    step = step_of(attention_mask(batch_size=2, q_length=3, kv_length=3, attention_mask=nothing))
    found = group.turn(attention, step, 2, 0, 3, keeps_past=False)
    assert found.plan is None
    assert group.pool.num_used == 0


def test_reading_again_writes_nothing() -> None:
    group, attention = group_of_two()
    turn(group, attention, 0, 5)
    plan = group.reread(attention, None, 1).plan
    assert plan is not None
    assert plan.common.slot_mapping is None
    assert plan.common.seq_lens.tolist() == [5, 5]
    with pytest.raises(InvalidInputError, match="queries per row is 6; allowed: 1 to 5"):
        group.reread(attention, None, 6)


def garbage(*size: int, **options: Any) -> torch.Tensor:
    return torch.full(size, nan, **options)


def test_blocks_of_the_host_are_zero_from_the_first() -> None:
    group, attention = group_of_two()
    turn(group, attention, 0, 5)
    cache = group.cache_of(0)
    reference = group.spec.allocate(len(cache), "cpu")
    assert (cache.shape, cache.stride()) == (reference.shape, reference.stride())
    assert not cache.any()
    cache[:4] = 7.0
    turn(group, attention, 5, 600)
    grown = group.cache_of(0)
    assert (grown[:4] == 7.0).all()
    assert not grown[4:].any()
    group.clear()
    assert not grown.any()


def test_blocks_hold_no_garbage_when_they_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attn_shared.paged_spec.torch.empty", garbage)
    group, attention = group_of_two()
    group.has_zero_pages = False  # as on a device
    turn(group, attention, 0, 5)
    cache = group.cache_of(0)
    assert group.pool.num_touched == 4
    assert not cache[:4].any()
    assert cache[4:].isnan().all()
    cache[:4] = 7.0
    turn(group, attention, 5, 300)  # more than the pool begins with
    grown = group.cache_of(0)
    assert len(grown) > len(cache)
    assert (grown[:4] == 7.0).all()
    assert not grown[4 : group.pool.num_touched].any()
    group.clear()
    assert not grown[: group.pool.num_touched].any()


@pytest.mark.parametrize("changes", [{}, {"kv_cache_dtype": "fp8"}, {"head_size_v": 16}])
def test_a_block_that_was_somebodys_is_zeroed_when_it_is_taken_again(
    changes: dict[str, Any],
) -> None:
    key = replace(KEY, **changes)
    attention = key.build(None)
    group = LayerGroup(key, attention, None)
    turn(group, attention, 0, 6)
    cache = group.cache_of(0)
    held = group.cache_of(0)[: group.pool.num_touched]
    held.copy_(torch.full(held.shape, nan))
    group.crop(6)  # rows lose all of their blocks
    plan = turn(group, attention, 0, 3).plan
    assert plan is not None
    table = plan.common.block_table
    assert table is not None
    assert table.flatten().tolist() != []
    for block in table.flatten().tolist():
        assert not cache[block].float().any()
    assert sum(bool(block.float().isnan().any()) for block in cache) == 2  # the others are nobody's


def test_what_a_row_loses_of_its_last_block_is_zeroed() -> None:
    group, attention = group_of_two()
    turn(group, attention, 0, 7)
    cache = group.cache_of(0)
    cache[: group.pool.num_touched] = nan
    group.crop(1)
    ends = {group.cache_of(0)[block].isnan().any(-1).all(-1).flatten().sum() for block in range(4)}
    assert {int(end) for end in ends} == {8, 4}  # keys and values of 4 tokens, and of 2
    group.select([1, 1])
    plan = turn(group, attention, 6, 1).plan
    assert plan is not None
    table = plan.common.block_table
    assert table is not None
    assert [cache[row[1]][:, :2].isnan().all() for row in table] == [True, True]  # copied, not zero
    assert [cache[row[1]][:, 2:].any() for row in table] == [False, False]


def test_no_cache_has_no_block() -> None:
    group, _ = group_of_two()
    with pytest.raises(InvalidInputError, match="num_blocks is 0"):
        ZeroPages(group.spec, 0)


def test_pages_go_with_the_last_tensor_over_them(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[weakref.ref[Any]] = []

    class Seen(mmap):
        def __new__(cls, *args: Any, **options: Any) -> Seen:
            made = super().__new__(cls, *args, **options)
            alive.append(weakref.ref(made))
            return made

    monkeypatch.setattr(zero_pages.mmap, "mmap", Seen)
    group, attention = group_of_two()
    turn(group, attention, 0, 5)
    view = group.cache_of(0)[1:]
    turn(group, attention, 5, 900)  # grows: the first pages are held by the view alone
    group.cache_of(0)
    assert [reference() is not None for reference in alive] == [True, True]
    del view
    gc.collect()
    assert [reference() is not None for reference in alive] == [False, True]
    del group
    gc.collect()
    assert [reference() is not None for reference in alive] == [False, False]


_FORK = """
import os
from test_groups import group_of_two, turn

group, attention = group_of_two()
turn(group, attention, 0, 5)
cache = group.cache_of(0)
cache[0] = 1.0
child = os.fork()
if child == 0:
    cache[0] = 2.0
    os._exit(0 if (cache[0] == 2.0).all() else 1)
assert os.waitpid(child, 0)[1] == 0
assert (cache[0] == 1.0).all()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a system without fork")
def test_a_fork_has_pages_of_its_own() -> None:
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environ = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", _FORK], check=True, env=environ)


def test_padding_at_the_end_is_answered_and_not_written() -> None:
    group, attention = group_of_two()
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    step = step_of(attention_mask(batch_size=2, q_length=3, kv_length=3, attention_mask=mask))
    plan = group.turn(attention, step, 2, 0, 3, keeps_past=False).plan
    assert plan is not None
    assert plan.common.seq_lens.tolist() == [2, 3, 2]
    assert plan.common.slot_mapping is not None
    assert [slot < 0 for slot in plan.common.slot_mapping.tolist()] == [False] * 5 + [True]
