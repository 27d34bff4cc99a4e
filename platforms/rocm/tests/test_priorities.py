"""The default order on AMD GPUs."""

from __future__ import annotations

from typing import Any

import pytest
from aiter_testing import MI300X, inventory, request

from attn_rocm.platform import RocmPlatform
from attn_rocm.priorities import PRIORITIES, runs_its_fast_path
from attn_shared.inventory import Inventory, VendorEntry, VendorStatus
from attn_shared.request import AttentionType, Phase
from attn_shared.selection import Policy
from attn_shared.selector import select


def order_of(**fields: Any) -> list[str]:
    return [item.name for item in RocmPlatform().candidates(request(**fields), MI300X)]


def test_only_backends_that_exist_are_ranked_and_no_measurement_is_claimed() -> None:
    assert {row.name for row in PRIORITIES} == {
        *("ROCM_AITER_FA", "ROCM_AITER_UNIFIED_ATTN", "ROCM_ATTN"),
        *("TRITON_ATTN", "TORCH_SDPA", "FLEX_ATTENTION"),
    }
    claimless = [row for row in PRIORITIES if row.name != "ROCM_ATTN"]
    assert all("not measured on this hardware" in row.provenance for row in claimless)


@pytest.mark.parametrize(
    ("fields", "is_fast"),
    [
        ({}, True),
        ({"phase": Phase.DECODE}, True),
        ({"window": (7, 0)}, False),
        ({"window": (7, 0), "phase": Phase.PREFILL}, True),
        ({"has_sinks": True}, False),
        ({"needs_lse": True}, False),
        ({"num_heads": 34, "num_kv_heads": 2}, False),
        ({"num_heads": 32, "num_kv_heads": 2}, True),
        ({"attn_type": AttentionType.ENCODER_ONLY, "block_size": None}, False),
    ],
)
def test_machine_code_is_first_where_its_fast_path_applies(
    fields: dict[str, Any], is_fast: bool
) -> None:
    assert runs_its_fast_path(request(**fields)) == is_fast
    order = order_of(**fields)
    assert (order[0] == "ROCM_AITER_FA") == is_fast
    assert is_fast or order.index("ROCM_AITER_FA") > order.index("TRITON_ATTN")


def test_the_libraries_that_a_caller_prefers_or_avoids_decide() -> None:
    found = Inventory(
        (
            *inventory(None).entries,
            VendorEntry(name="triton", status=VendorStatus.ASSUMED),
        )
    )

    def chosen(policy: Policy, **fields: Any) -> str:
        return select(request(**fields), MI300X, found, policy).backend_cls.name

    assert chosen(Policy()) == "ROCM_AITER_FA"
    assert chosen(Policy(avoid=("aiter",))) == "TRITON_ATTN"
    assert chosen(Policy(prefer=("triton",))) == "TRITON_ATTN"
    assert chosen(Policy(), has_sinks=True) == "ROCM_AITER_UNIFIED_ATTN"
    assert chosen(Policy(), softcap=30.0, window=(7, 0)) == "TRITON_ATTN"
    slow = Policy(prefer=("aiter",))
    assert chosen(slow, softcap=30.0, window=(7, 0)) == "TRITON_ATTN", "a slow path is no gain"
    assert chosen(Policy(backend="ROCM_AITER_FA"), window=(7, 0)) == "ROCM_AITER_FA"
    assert chosen(Policy(backend="ROCM_ATTN")) == "ROCM_ATTN"
