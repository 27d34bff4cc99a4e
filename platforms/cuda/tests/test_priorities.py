"""The default order on NVIDIA GPUs."""

from __future__ import annotations

from typing import Any

import pytest

from attn_cuda.priorities import PRIORITIES
from attn_shared.device import preset
from attn_shared.ranking import rank
from attn_shared.request import AttentionRequest, Phase


def test_only_backends_that_exist_are_ranked() -> None:
    ranked = {row.name for row in PRIORITIES if row.priority is not None}
    own = {"FLASH_ATTN", "FLASHINFER", "FLASHINFER_TRTLLM"}
    assert ranked == own | {"TRITON_ATTN", "TORCH_SDPA", "FLEX_ATTENTION"}
    assert {row.name for row in PRIORITIES} - ranked == {"FLASH_ATTN_DIFFKV"}


def test_a_measurement_is_claimed_of_hopper_alone() -> None:
    rows = [row for row in PRIORITIES if row.priority is not None]
    claimed = [row for row in rows if "not measured on this hardware" not in row.provenance]
    measured = {"FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "TORCH_SDPA"}
    assert {row.name for row in claimed} == measured
    for row in claimed:
        assert row.families == {"hopper"}
        assert row.provenance.startswith("measured on an H200 ")


@pytest.mark.parametrize("name", ["h200", "a100"])
def test_the_order_is_the_same_whether_measured_or_not(name: str) -> None:
    assert order_on(name) == [
        "FLASH_ATTN",
        "FLASHINFER",
        "TRITON_ATTN",
        "TORCH_SDPA",
        "FLEX_ATTENTION",
    ]


def test_in_decode_on_hopper_tritons_kernels_stand_before_flashinfers() -> None:
    order = order_on("h200", phase=Phase.DECODE)
    assert order[:3] == ["FLASH_ATTN", "TRITON_ATTN", "FLASHINFER"]


def test_on_blackwell_flashinfer_stands_first_and_nvidias_kernels_within_it() -> None:
    order = order_on("b200")
    assert order[:4] == ["FLASHINFER_TRTLLM", "FLASHINFER", "FLASH_ATTN", "TRITON_ATTN"]
    assert order_on("rtx5090")[0] == "FLASH_ATTN"


def order_on(name: str, **options: Any) -> list[str]:
    request = AttentionRequest(num_heads=32, num_kv_heads=8, head_size=128, **options)
    return [item.name for item in rank(PRIORITIES, request, preset(name)) if item.priority]
