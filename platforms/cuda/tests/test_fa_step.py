"""What a call of FlashAttention is made of."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch

from attn_cuda._fa_step import KeyStep, sides


def test_a_schedule_changes_nothing_else() -> None:
    values: dict[str, Any] = {item.name: object() for item in fields(KeyStep)}
    step = KeyStep(**values)
    schedule = torch.zeros(1, dtype=torch.int32)
    found = step.with_schedule(schedule)
    assert found.schedule is schedule
    for name in values.keys() - {"schedule"}:
        assert getattr(found, name) is values[name]


def test_an_unbounded_side_is_written_as_the_library_writes_it() -> None:
    assert sides((4, None), -1) == (4, -1)
    assert sides((None, 0), None) == (None, 0)


def test_requests_are_counted_by_their_starts() -> None:
    starts = torch.tensor([0, 1, 4], dtype=torch.int32)
    assert (
        KeyStep(query_start_loc=starts, max_query_len=3, max_key_len=9, causal=True).num_reqs == 2
    )
