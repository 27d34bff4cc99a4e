"""What cannot be spread over ranks, whatever backend runs it."""

from __future__ import annotations

from typing import Any

import pytest

from attn_shared._dcp_rules import dcp_objections, pcp_objections
from attn_shared.request import AttentionRequest, MLADims


def request(**options: Any) -> AttentionRequest:
    return AttentionRequest(**{"num_heads": 8, "num_kv_heads": 2, "head_size": 64, **options})


EVERYTHING = {
    "window": (7, 0),
    "has_sinks": True,
    "has_alibi": True,
    "softcap": 20.0,
    "kv_cache_dtype": "fp8",
    "needs_lse": True,
}


def test_whole_sequences_meet_no_objection() -> None:
    asked = request(**EVERYTHING, chunk_size=64, use_mm_prefix=True, attn_type="encoder")
    assert list(dcp_objections(asked)) == []
    assert list(pcp_objections(asked)) == []


def test_causal_decoders_are_sharded_and_split_with_every_feature() -> None:
    asked = request(**EVERYTHING, dcp_size=2, pcp_size=2)
    assert list(dcp_objections(asked)) == []
    assert list(pcp_objections(asked)) == []
    assert list(dcp_objections(request(dcp_size=2, non_causal=True))) == []
    assert list(dcp_objections(request(dcp_size=2, use_mm_prefix=True))) == []
    assert list(pcp_objections(request(pcp_size=2, chunk_size=64))) == []
    assert list(pcp_objections(request(pcp_size=2, non_causal=True))) == []


@pytest.mark.parametrize(
    ("options", "code", "value"),
    [
        ({"attn_type": "encoder_decoder"}, "dcp_attn_type", "encoder_decoder"),
        ({"chunk_size": 64}, "dcp_chunked_local", "64"),
        ({"use_sparse": True}, "dcp_sparse", "True"),
        ({"window": (3, 3), "non_causal": True}, "dcp_window", "(3, 3)"),
        ({"window": (3, 0), "use_mm_prefix": True}, "dcp_window", "(3, 0)"),
        ({"window": (3, 0), "per_request_causal": True}, "dcp_window", "(3, 0)"),
        ({"has_alibi": True, "non_causal": True}, "dcp_alibi", "True"),
        ({"has_alibi": True, "use_mm_prefix": True}, "dcp_alibi", "True"),
    ],
)
def test_a_sharded_cache_says_value_and_size(
    options: dict[str, Any], code: str, value: str
) -> None:
    (objection,) = dcp_objections(request(dcp_size=4, **options))
    assert (objection.code, objection.value) == (code, value)
    assert "dcp_size=4" in objection.allowed


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"attn_type": "encoder_only"}, "pcp_attn_type"),
        ({"use_mm_prefix": True}, "pcp_mm_prefix"),
        ({"window": (3, 3), "non_causal": True}, "pcp_non_causal"),
        ({"has_alibi": True, "per_request_causal": True}, "pcp_non_causal"),
        ({"num_kv_heads": 1, "head_size": 576, "mla": MLADims()}, "pcp_mla"),
    ],
)
def test_split_tokens_say_what_is_in_the_way(options: dict[str, Any], code: str) -> None:
    (objection,) = pcp_objections(request(pcp_size=2, **options))
    assert objection.code == code
    assert "pcp_size=2" in objection.allowed
