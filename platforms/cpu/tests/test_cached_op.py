"""`attention_cached`: the answer of `attention` bit for bit, from fewer arguments."""

from __future__ import annotations

import contextlib
import itertools
import math
from typing import Any

import pytest
import torch
from attn_cpu_testing import (
    attention_arguments,
    cached_arguments,
    levels,
    needs_kernels,
    plan_of,
    run,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from test_op_inputs import DTYPES, WRONG, mutated, tensors

from attn_cpu.isa import level_named

pytestmark = needs_kernels

TENSORS = ("query", "out", "new_key", "new_value", "kv_cache", "block_table", "plan", "workspace")
FLAWED_LAYERS = [
    (0, math.nan, "scale is nan"),
    (1, -1.0, "softcap is -1"),
    (2, 2.0, "layer k_scale, v_scale is 2; allowed: 1, unless the cache is fp8"),
    (4, 1.0, "query dtype is float32; allowed: the layer's"),
    (5, 1.0, "kv_cache dtype is float32; allowed: the layer's"),
    (6, math.inf, "kv_cache block size is 8; allowed: the layer's"),
    (6, 16.0, "kv_cache block size is 8; allowed: the layer's, 16"),
    (7, 8.0, "plan num_heads is 4; allowed: the layer's, 8"),
    (8, 4.0, "plan num_kv_heads is 2; allowed: the layer's, 4"),
    (9, 64.0, "plan head_size is 32; allowed: the layer's, 64"),
]


def call(arguments: dict[str, Any]) -> torch.Tensor:
    torch.ops.attn_cpu.attention_cached(**arguments)
    out: torch.Tensor = arguments["out"]
    return out


def planned(arguments: dict[str, Any]) -> dict[str, Any]:
    return arguments | {"plan": plan_of(arguments)}


@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "options",
    [{}, {"window_left": 3}, {"chunk_size": 4}, {"causal": False, "window_right": 1}],
    ids=["causal", "window", "chunk", "two_sided"],
)
def test_the_same_answer(level: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    arguments = planned(attention_arguments(dtype, lse=None, isa=level_named(level), **options))
    expected = run(arguments)
    assert expected.any()
    assert torch.equal(call(cached_arguments(arguments)), expected)


@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_with_scales_and_a_cap(level: str, stored: torch.dtype, dtype: torch.dtype) -> None:
    arguments = attention_arguments(dtype, lse=None, isa=level_named(level), softcap=5.0)
    for name in ("key", "value"):
        arguments[name] = arguments[name].to(stored)
    arguments |= {"k_scale": torch.tensor([0.5]), "v_scale": torch.tensor([3.0])}
    expected = run(arguments)
    assert torch.equal(call(cached_arguments(arguments, 5.0, (0.5, 3.0))), expected)


def test_heads_first_and_a_workspace() -> None:
    arguments = attention_arguments(lse=None)
    size = torch.ops.attn_cpu.workspace_bytes(arguments["plan"])
    arguments["workspace"] = torch.zeros(size, dtype=torch.uint8)
    for name in ("key", "value"):
        arguments[name] = arguments[name].transpose(1, 2).contiguous().transpose(1, 2)
    cached = cached_arguments(arguments)
    assert cached["kv_cache"].stride(3) > cached["kv_cache"].stride(2)
    assert torch.equal(call(cached), run(arguments))


@pytest.mark.parametrize(("place", "number", "words"), FLAWED_LAYERS)
def test_a_wrong_layer_is_named(place: int, number: float, words: str) -> None:
    arguments = cached_arguments(attention_arguments())
    arguments["layer"][place] = number
    with pytest.raises(RuntimeError, match=words):
        call(arguments)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        pair
        for pair in itertools.product(("query", "out", "kv_cache", "layer"), WRONG)
        if pair not in {("kv_cache", "shorter"), ("layer", "float64"), ("layer", "flat")}
    ],
)
def test_a_wrong_tensor_is_named(name: str, change: str) -> None:
    arguments = cached_arguments(attention_arguments())
    arguments[name] = WRONG[change](arguments[name])
    with pytest.raises((RuntimeError, NotImplementedError, ValueError)) as caught:
        call(arguments)
    assert caught.value.args[0]


def test_an_entry_of_the_table_is_held_to_the_cache() -> None:
    arguments = cached_arguments(attention_arguments())
    arguments["kv_cache"] = arguments["kv_cache"][:4]
    with pytest.raises(RuntimeError, match=r"block_table\[0, 0\] is 4; allowed: 0 to 3"):
        call(arguments)


def test_requests_with_rules_of_their_own_are_not_served() -> None:
    flags = torch.tensor([True, False, True])
    ranges = torch.tensor([[1, 0, 3]], dtype=torch.int32)
    for option in ({"causal_per_request": flags}, {"mm_prefix_ranges": ranges}):
        arguments = planned(attention_arguments(**option))
        with pytest.raises(RuntimeError, match="plan is of requests with rules of their own"):
            call(cached_arguments(arguments))


def test_new_keys_are_held_to_the_layer() -> None:
    arguments = cached_arguments(attention_arguments())
    row = torch.zeros(4, 2, 32)
    call(arguments | {"new_key": row, "new_value": row})
    for key, value in ((row, None), (None, row), (row, row.half()), (row[..., :16], row)):
        with pytest.raises(RuntimeError, match="new_"):
            call(arguments | {"new_key": key, "new_value": value})


def test_a_tensor_of_another_device_is_named() -> None:
    arguments = cached_arguments(attention_arguments())
    with pytest.raises(RuntimeError, match=r"device is one of \['cpu', 'meta'\]"):
        call(arguments | {"kv_cache": arguments["kv_cache"].to("meta")})


@settings(max_examples=400, deadline=None)
@given(data=st.data(), dtype=st.sampled_from(DTYPES[:3]))
def test_it_never_crashes(data: st.DataObject, dtype: torch.dtype) -> None:
    arguments = cached_arguments(attention_arguments(dtype))
    names = (*TENSORS, "layer")
    for name in data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True)):
        source = arguments[name]
        near = data.draw(st.booleans()) and source is not None
        arguments[name] = data.draw(mutated(source) if near else tensors())
    with contextlib.suppress(RuntimeError, NotImplementedError, ValueError, TypeError):
        call(arguments)
