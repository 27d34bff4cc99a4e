"""A group's passes: begun by its first layer, shared by the others."""

from __future__ import annotations

from math import nan
from typing import Any

import pytest
import torch

from attn_shared.errors import InvalidInputError
from attn_shared.layer import Attention
from attn_shared.selection import Policy
from attn_transformers.groups import LayerGroup
from attn_transformers.layers import LayerKey
from attn_transformers.masks import attention_mask, step_of
from attn_transformers.turns import Turn

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


def test_padding_at_the_end_is_answered_and_not_written() -> None:
    group, attention = group_of_two()
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    step = step_of(attention_mask(batch_size=2, q_length=3, kv_length=3, attention_mask=mask))
    plan = group.turn(attention, step, 2, 0, 3, keeps_past=False).plan
    assert plan is not None
    assert plan.common.seq_lens.tolist() == [2, 3, 2]
    assert plan.common.slot_mapping is not None
    assert [slot < 0 for slot in plan.common.slot_mapping.tolist()] == [False] * 5 + [True]
