from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch

from attn_cli.request_flags import RequestFlags
from attn_shared.errors import InvalidInputError, InvalidRequestError, UnknownNameError
from attn_shared.request import AttentionRequest, AttentionType, MLADims, Phase

ONE_FIELD = [
    ({"head_size_v": 32}, "head_size_v", 32),
    ({"dtype": "fp16"}, "dtype", torch.float16),
    ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype", "fp8"),
    ({"block_size": 48}, "block_size", 48),
    ({"kv_layout": "HND"}, "kv_layout", "HND"),
    ({"sparse": True}, "use_sparse", True),
    ({"sinks": True}, "has_sinks", True),
    ({"attn_type": "encoder_only"}, "attn_type", AttentionType.ENCODER_ONLY),
    ({"non_causal": True}, "non_causal", True),
    ({"per_request_causal": True}, "per_request_causal", True),
    ({"mm_prefix": True}, "use_mm_prefix", True),
    ({"window": "7,none"}, "window", (7, None)),
    ({"chunk_size": 512}, "chunk_size", 512),
    ({"softcap": 30.0}, "softcap", 30.0),
    ({"alibi": True}, "has_alibi", True),
    ({"batch_invariant": True}, "batch_invariant", True),
    ({"kv_connector": True}, "use_kv_connector", True),
    ({"per_head_scales": True}, "per_head_quant_scales", True),
    ({"lse": True}, "needs_lse", True),
    ({"flash_attn_version": 3}, "flash_attn_version", 3),
    ({"dcp": 2}, "dcp_size", 2),
    ({"pcp": 4}, "pcp_size", 4),
    ({"phase": "decode"}, "phase", Phase.DECODE),
]


def request(**flags: Any) -> AttentionRequest:
    return RequestFlags(**{"num_heads": 8, "head_size": 64, **flags}).to_request()


@pytest.mark.parametrize(("flags", "field", "value"), ONE_FIELD)
def test_a_flag_sets_its_field_and_no_other(flags: Any, field: str, value: object) -> None:
    plain, changed = request(), request(**flags)
    different = {
        f.name
        for f in dataclasses.fields(AttentionRequest)
        if getattr(plain, f.name) != getattr(changed, f.name)
    }
    assert different == {field}
    assert getattr(changed, field) == value


def test_every_field_of_a_request_has_a_flag() -> None:
    heads = {"num_heads", "num_kv_heads", "head_size", "mla", "index_topk"}  # tested below
    covered = {field for _, field, _ in ONE_FIELD} | heads
    assert covered == {f.name for f in dataclasses.fields(AttentionRequest)}


def test_the_indexers_size_goes_with_sparse_attention() -> None:
    assert request(sparse=True, index_topk=2048).index_topk == 2048


def test_kv_heads_default_to_query_heads() -> None:
    assert (request().num_kv_heads, request(num_kv_heads=2).num_kv_heads) == (8, 2)


@pytest.mark.parametrize(
    ("kv_heads", "tp", "expected"), [(8, 4, (8, 2)), (2, 8, (4, 1)), (8, 1, (32, 8))]
)
def test_heads_are_divided_among_ranks(kv_heads: int, tp: int, expected: tuple[int, int]) -> None:
    found = request(num_heads=32, num_kv_heads=kv_heads, tp=tp)
    assert (found.num_heads, found.num_kv_heads) == expected


@pytest.mark.parametrize("num_kv_heads", [0, -8])
def test_ranks_do_not_hide_a_bad_number_of_kv_heads(num_kv_heads: int) -> None:
    with pytest.raises(InvalidRequestError, match=re.escape(str(num_kv_heads))):
        request(num_kv_heads=num_kv_heads)


def test_mla_has_deepseeks_widths_one_kv_head_and_the_latents_size() -> None:
    found = RequestFlags(num_heads=128, mla=True).to_request()
    assert found.mla == MLADims(
        kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
    )
    assert (found.num_kv_heads, found.head_size) == (1, 576)


def test_a_width_of_mla_implies_it() -> None:
    found = RequestFlags(num_heads=16, kv_lora_rank=256, q_lora_rank=96).to_request()
    assert found.mla == MLADims(kv_lora_rank=256, q_lora_rank=96)
    assert found.head_size == 256 + 64


def test_head_size_is_asked_for_without_mla() -> None:
    with pytest.raises(InvalidInputError, match=r"--head-size is missing.*--mla"):
        RequestFlags(num_heads=8).to_request()


@pytest.mark.parametrize(
    ("flags", "window"),
    [
        ({"window": "128"}, (127, 0)),
        ({"window": "128", "non_causal": True}, (127, 127)),
        ({"window": "128", "attn_type": "encoder_only"}, (127, 127)),
        ({"window": "0,0"}, (0, 0)),
        ({"window": " 5 , 3 "}, (5, 3)),
        ({"window": "NONE,4"}, (None, 4)),
        ({"window": "none"}, (None, None)),
    ],
)
def test_windows(flags: Any, window: object) -> None:
    assert request(**flags).window == window


def test_an_empty_dtype_is_no_default() -> None:
    with pytest.raises(UnknownNameError, match="unknown dtype ''"):
        request(dtype="")


@pytest.mark.parametrize("window", ["", "a", "1,2,3", "1.5", "4,x"])
def test_a_window_that_is_none_is_named_with_what_is_allowed(window: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        request(window=window)
    assert f"--window is {window!r}" in caught.value.message
    assert "LEFT,RIGHT" in caught.value.message


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"head_size": 0}, "head_size=0"),
        ({"head_size": -1}, "head_size=-1"),
        ({"num_heads": 10, "num_kv_heads": 4}, "a divisor of num_heads=10"),
        ({"block_size": 0}, "block_size=0"),
        ({"block_size": -16}, "block_size=-16"),
        ({"window": "0"}, "window=0"),
        ({"window": "-1,0"}, "window=(-1, 0)"),
        ({"softcap": float("nan")}, "softcap=nan"),
        ({"num_heads": 8, "tp": 3}, "tp_size=3"),
    ],
)
def test_values_that_no_backend_may_accept(flags: Any, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=re.escape(words)):
        request(**flags)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"dtype": "bfloat17"}, "unknown dtype 'bfloat17'; allowed: bfloat16, float16, float32"),
        ({"kv_cache_dtype": "fp9"}, "unknown kv_cache_dtype 'fp9'; allowed: auto"),
        ({"kv_layout": "HNN"}, "unknown kv_layout 'HNN'; allowed: HND, NHD"),
        ({"attn_type": "self"}, "unknown attn_type 'self'; allowed: decoder"),
        ({"phase": "warmup"}, "unknown phase 'warmup'; allowed: decode, mixed, prefill"),
    ],
)
def test_names_that_nobody_knows(flags: Any, words: str) -> None:
    with pytest.raises(UnknownNameError, match=re.escape(words)):
        request(**flags)
