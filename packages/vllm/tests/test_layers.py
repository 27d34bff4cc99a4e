from __future__ import annotations

from enum import Enum
from typing import Any

import pytest
import torch

from attn_shared.errors import InvalidRequestError, UnsupportedOptionError
from attn_shared.request import AttentionType
from attn_vllm.layers import EngineFacts, LayerArguments, request_of


class _EngineType(str, Enum):  # noqa: UP042  (as the engine writes it)
    ENCODER_ONLY = "encoder_only"


def facts(**changes: Any) -> EngineFacts:
    return EngineFacts(dtype=torch.bfloat16, device=torch.device("cpu"), **changes)


def arguments(**changes: Any) -> LayerArguments:
    fields = {"num_heads": 8, "head_size": 64, "scale": 0.125, "num_kv_heads": 2, **changes}
    return LayerArguments(**fields)


def test_a_plain_layer() -> None:
    request = request_of(arguments(), facts())
    assert (request.num_heads, request.num_kv_heads, request.head_size) == (8, 2, 64)
    assert request.dtype is torch.bfloat16
    assert request.window == (None, None)
    assert request.softcap is None
    assert request.block_size is None
    assert request.attn_type is AttentionType.DECODER


def test_no_kv_heads_are_as_many_as_query_heads() -> None:
    assert request_of(arguments(num_kv_heads=None), facts()).num_kv_heads == 8


@pytest.mark.parametrize(
    ("given", "window"), [(None, (None, None)), (-1, (None, None)), (5, (4, 0))]
)
def test_a_window_counts_the_query_s_own_key(given: int | None, window: tuple[Any, Any]) -> None:
    assert request_of(arguments(sliding_window=given), facts()).window == window


def test_an_encoder_s_window_has_two_sides() -> None:
    asked = arguments(sliding_window=5, attn_type=_EngineType.ENCODER_ONLY)
    request = request_of(asked, facts())
    assert request.attn_type is AttentionType.ENCODER_ONLY
    assert request.window == (4, 4)


def test_every_option_arrives() -> None:
    asked = arguments(
        logits_soft_cap=30.0,
        sinks=torch.zeros(8),
        alibi_slopes=[0.5] * 8,
        kv_cache_dtype="fp8_e5m2",
    )
    engine = facts(block_size=32, batch_invariant=True, use_kv_connector=True)
    request = request_of(asked, engine, head_size_v=96, use_mm_prefix=True)
    assert request.softcap == 30.0
    assert request.has_sinks
    assert request.has_alibi
    assert request.kv_cache_dtype == "fp8_e5m2"
    assert request.block_size == 32
    assert request.batch_invariant
    assert request.use_kv_connector
    assert request.value_size == 96
    assert request.use_mm_prefix


def test_the_kernels_block_size_wins_over_the_user_s() -> None:
    assert request_of(arguments(), facts(block_size=64), block_size=16).block_size == 16


def test_arguments_of_a_model_s_own_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedOptionError, match="chunk_lookback=3"):
        request_of(arguments(others={"chunk_lookback": 3, "use_alibi_sqrt": False}), facts())


def test_cross_attention_is_refused() -> None:
    with pytest.raises(UnsupportedOptionError, match="cross-attention"):
        request_of(arguments(attn_type="encoder_decoder"), facts())


@pytest.mark.parametrize("sizes", [{"dcp_size": 2}, {"pcp_size": 4}])
def test_the_engine_s_own_sharding_is_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(UnsupportedOptionError, match=str(next(iter(sizes.values())))):
        request_of(arguments(), facts(**sizes))


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="num_kv_heads=3"):
        request_of(arguments(num_kv_heads=3), facts())
