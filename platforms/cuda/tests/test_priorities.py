"""The default order on NVIDIA GPUs."""

from __future__ import annotations

import pytest

from attn_cuda.priorities import PRIORITIES
from attn_shared.device import preset
from attn_shared.ranking import rank
from attn_shared.request import AttentionRequest


def test_only_backends_that_exist_are_ranked() -> None:
    ranked = {row.name for row in PRIORITIES if row.priority is not None}
    assert ranked == {"FLASH_ATTN", "TRITON_ATTN", "TORCH_SDPA", "FLEX_ATTENTION"}
    assert {row.name for row in PRIORITIES} - ranked == {"FLASH_ATTN_DIFFKV"}


def test_a_measurement_is_claimed_of_hopper_alone() -> None:
    rows = [row for row in PRIORITIES if row.priority is not None]
    claimed = [row for row in rows if "not measured on this hardware" not in row.provenance]
    assert {row.name for row in claimed} == {"FLASH_ATTN", "TRITON_ATTN", "TORCH_SDPA"}
    for row in claimed:
        assert row.families == {"hopper"}
        assert row.provenance.startswith("measured on an H200 ")


@pytest.mark.parametrize("name", ["h200", "a100"])
def test_the_order_is_the_same_whether_measured_or_not(name: str) -> None:
    request = AttentionRequest(num_heads=32, num_kv_heads=8, head_size=128)
    order = [item.name for item in rank(PRIORITIES, request, preset(name)) if item.priority]
    assert order == ["FLASH_ATTN", "TRITON_ATTN", "TORCH_SDPA", "FLEX_ATTENTION"]
