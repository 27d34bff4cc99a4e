"""Which phase may run on trtllm-gen or XQA; recorded rows are compared in tests/."""

from __future__ import annotations

from typing import Any

import pytest

from attn_cuda._fi_trtllm import (
    DECODE,
    PREFILL,
    TrtllmCase,
    can_use_trtllm,
    kernels_of,
    use_trtllm,
)
from attn_shared.device import preset

H200, B200, A100, RTX = map(preset, ("h200", "b200", "a100", "rtx5090"))


def case(phase: str, **changes: Any) -> TrtllmCase:
    return TrtllmCase(**{"phase": phase, "num_heads": 32, "num_kv_heads": 8, **changes})


def test_kernels_are_those_of_the_family_and_the_phase() -> None:
    found = {
        (device.arch, phase): kernels_of(device, phase)
        for device in (H200, B200, A100, RTX)
        for phase in (PREFILL, DECODE)
    }
    assert {key: name for key, name in found.items() if name is not None} == {
        ("sm_90", DECODE): "xqa",
        ("sm_100", PREFILL): "trtllm-gen",
        ("sm_100", DECODE): "trtllm-gen",
    }


@pytest.mark.parametrize(
    "changes",
    [{"force": False}, {"batch_invariant": True}, {"num_heads": 10, "num_kv_heads": 4}],
    ids=["switched-off", "invariant", "ratio"],
)
def test_what_makes_it_impossible(changes: dict[str, Any]) -> None:
    forced = {"force": True, **changes}
    for phase in (PREFILL, DECODE):
        assert can_use_trtllm(case(phase, force=True), B200)
        assert not can_use_trtllm(case(phase, **forced), B200)
        assert not use_trtllm(case(phase, **forced), B200)


@pytest.mark.parametrize(
    ("phase", "changes", "on_hopper", "on_blackwell"),
    [
        (DECODE, {}, True, True),
        (DECODE, {"num_tokens": 257}, False, False),
        (DECODE, {"num_tokens": 257, "force": True}, True, True),
        (DECODE, {"num_tokens": 257, "has_drafts": True}, True, True),
        (DECODE, {"num_tokens": 257, "kv_cache_dtype": "fp8"}, True, False),
        (DECODE, {"force": True, "dcp_size": 2}, False, False),
        (PREFILL, {}, False, True),
        (PREFILL, {"kv_cache_dtype": "fp8"}, False, False),
        (PREFILL, {"kv_cache_dtype": "fp8", "query_is_fp8": True}, False, True),
        (PREFILL, {"kv_cache_dtype": "fp8", "has_sinks": True}, False, True),
        (PREFILL, {"has_drafts": True, "kv_cache_dtype": "fp8"}, False, False),
    ],
)
def test_where_it_is_expected_to_pay(
    phase: str, changes: dict[str, Any], on_hopper: bool, on_blackwell: bool
) -> None:
    asked = case(phase, **changes)
    assert (use_trtllm(asked, H200), use_trtllm(asked, B200)) == (on_hopper, on_blackwell)
    assert not use_trtllm(asked, A100)
