from __future__ import annotations

import pytest
import torch

from attn_cpu._attn_capability import CAPABILITY
from attn_shared.device import preset
from attn_shared.request import AttentionRequest, AttentionType

CPU = preset("genericcpu")


def codes(**fields: object) -> list[str]:
    values = {"num_heads": 8, "num_kv_heads": 2, "head_size": 64} | fields
    return [reason.code for reason in CAPABILITY.check(AttentionRequest(**values), CPU)]  # type: ignore[arg-type]


@pytest.mark.parametrize("head_size", [32, 40, 64, 80, 96, 128, 192, 256, 512, 576])
def test_head_sizes(head_size: int) -> None:
    assert codes(head_size=head_size) == []


@pytest.mark.parametrize("head_size", [8, 24, 36, 100, 584])
def test_head_sizes_that_are_not_served(head_size: int) -> None:
    assert codes(head_size=head_size) == ["head_size"]


@pytest.mark.parametrize(
    "fields",
    [
        {"head_size": 192, "head_size_v": 128},
        {"dtype": torch.float16},
        {"kv_cache_dtype": "fp8_e5m2"},
        {"kv_cache_dtype": "int8_per_token_head"},
        {"kv_cache_dtype": "bfloat16", "dtype": torch.bfloat16},
        {"block_size": 16},
        {"block_size": 7},
        {"window": (100, 0), "softcap": 30.0, "has_sinks": True, "has_alibi": True},
        {"attn_type": AttentionType.ENCODER_ONLY, "window": (4, 4)},
        {"attn_type": AttentionType.ENCODER_DECODER},
        {"non_causal": True},
        {"per_request_causal": True},
        {"use_mm_prefix": True},
        {"chunk_size": 64},
        {"batch_invariant": True},
        {"needs_lse": True},
    ],
)
def test_served(fields: dict[str, object]) -> None:
    assert codes(**fields) == []


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"kv_cache_dtype": "float32", "dtype": torch.bfloat16}, "kv_cache_dtype"),
        ({"chunk_size": 64, "non_causal": True}, "chunked_local_causal"),
        (
            {"use_mm_prefix": True, "attn_type": AttentionType.ENCODER_DECODER},
            "mm_prefix_decoder",
        ),
        ({"dcp_size": 2, "chunk_size": 64}, "dcp_chunked_local"),
    ],
)
def test_not_served(fields: dict[str, object], code: str) -> None:
    assert codes(**fields) == [code]


def test_a_cache_is_sharded_and_tokens_are_split() -> None:
    assert codes(dcp_size=2) == []
    assert codes(pcp_size=2) == []


def test_no_gpu() -> None:
    request = AttentionRequest(num_heads=8, num_kv_heads=2, head_size=64)
    assert [reason.code for reason in CAPABILITY.check(request, preset("h200"))] == ["device"]
