"""Calls that do not fit are refused before any kernel runs: argument, value, what is allowed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attn_shared.call_checks import CallChecker
from attn_shared.errors import (
    AttnError,
    InvalidInputError,
    MetadataError,
    UnsupportedOptionError,
)
from attn_shared.kv_cache import FullAttentionSpec
from attn_shared.request import AttentionType
from attn_shared.spec import LayerSpec
from attn_shared.tensor_checks import check_block_size, check_scale

CPU, META = torch.device("cpu"), torch.device("meta")
CACHE = FullAttentionSpec(
    block_size=64, num_kv_heads=2, head_size=16, head_size_v=8, dtype=torch.float32
)
LAYER = LayerSpec(
    num_heads=4,
    num_kv_heads=2,
    head_size=16,
    head_size_v=8,
    scale=0.25,
    dtype=torch.float32,
    kv_cache_spec=CACHE,
)
FP8 = replace(LAYER, kv_cache_spec=replace(CACHE, kv_cache_dtype="fp8", dtype=torch.float8_e4m3fn))
INT8 = replace(
    LAYER, kv_cache_spec=replace(CACHE, kv_cache_dtype="int8_per_token_head", dtype=torch.int8)
)
ENCODER = replace(LAYER, kv_cache_spec=None, attn_type=AttentionType.ENCODER)
QUERY, OUTPUT, LSE = torch.zeros(6, 4, 16), torch.zeros(6, 4, 8), torch.zeros(4, 6)
KEY, VALUE = torch.zeros(5, 2, 16), torch.zeros(5, 2, 8)


def tensors(
    query: Any = QUERY,
    output: Any = None,
    lse: Any = None,
    num_tokens: int = 6,
    device: torch.device | None = None,
) -> None:
    CallChecker(LAYER).check_tensors(query, output, lse, num_tokens, device)


def layer(**options: Any) -> Any:
    plain = {"q_scale": 1.0, "k_scale": 1.0, "v_scale": 1.0, "sinks": None, "alibi_slopes": None}
    return SimpleNamespace(**(plain | options))


def test_tensors_that_fit_and_padding_rows() -> None:
    tensors(output=OUTPUT, lse=LSE, device=CPU)
    tensors(num_tokens=4)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"query": QUERY.tolist()}, "query is a list; allowed: a tensor"),
        ({"query": None}, "query is a NoneType"),
        ({"query": QUERY.bfloat16()}, "query dtype is torch.bfloat16; allowed: torch.float32"),
        ({"query": QUERY.view(6, 64)}, r"query shape is \(6, 64\); allowed: \(T, 4, 16\)"),
        ({"query": QUERY[:, :2]}, r"query shape is \(6, 2, 16\); allowed: \(T, 4, 16\)"),
        ({"query": QUERY[..., :8]}, r"query shape is \(6, 4, 8\)"),
        ({"query": QUERY.to(META), "device": CPU}, "query device is meta; allowed: cpu, the meta"),
        ({"num_tokens": 7}, "query rows is 6; allowed: at least 7"),
        ({"output": [0.0]}, "output is a list"),
        ({"output": QUERY}, r"output shape is \(6, 4, 16\); allowed: \(6, 4, 8\)"),
        ({"output": OUTPUT[:3]}, r"output shape is \(3, 4, 8\)"),
        ({"output": OUTPUT.half()}, "output dtype is torch.float16"),
        ({"output": OUTPUT.to(META)}, "output device is meta; allowed: cpu"),
        ({"lse": torch.zeros(6, 4)}, r"lse shape is \(6, 4\); allowed: \(4, 6\)"),
        ({"lse": LSE.half()}, "lse dtype is torch.float16; allowed: torch.float32"),
        ({"lse": LSE.to(META)}, "lse device is meta"),
    ],
)
def test_tensors_of_another_layer_or_batch(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        tensors(**arguments)


def test_an_lse_that_is_not_returned() -> None:
    checker = CallChecker(LAYER, returns_lse=False)
    checker.check_tensors(QUERY, OUTPUT, None, 6)
    with pytest.raises(UnsupportedOptionError, match="lse is given"):
        checker.check_tensors(QUERY, OUTPUT, LSE, 6)


def test_a_cache_and_its_format_are_returned() -> None:
    cache = CACHE.allocate(1, CPU)
    found, spec = CallChecker(LAYER).check_cache(cache, CPU)
    assert found is cache
    assert spec is CACHE


@pytest.mark.parametrize(
    ("spec", "cache", "words"),
    [
        (LAYER, None, "kv_cache is None; allowed: the layer's cache with attn_type=decoder"),
        (LAYER, [KEY], "kv_cache is a list"),
        (LAYER, CACHE.allocate(1, META), "kv_cache device is meta; allowed: cpu"),
        (ENCODER, CACHE.allocate(1, CPU), "kv_cache_spec is None; allowed: an AttentionSpec"),
    ],
)
def test_a_cache_that_is_not_the_layers(spec: LayerSpec, cache: Any, words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        CallChecker(spec).check_cache(cache, CPU)


def test_keys_of_a_call_without_a_cache_are_returned() -> None:
    assert CallChecker(ENCODER).check_keys(KEY, VALUE, None, CPU, 5) == (KEY, VALUE)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"key": None}, r"key shape is None; allowed: \(at least 5, 2, 16\) with encoder"),
        ({"value": None}, "value shape is None"),
        ({"key": [0.0]}, "key is a list"),
        ({"key": KEY[:4]}, r"key shape is \(4, 2, 16\)"),
        ({"key": KEY.flatten(1)}, r"key shape is \(5, 32\)"),
        ({"value": VALUE[:, :1]}, r"value shape is \(5, 1, 8\)"),
        ({"value": KEY}, r"value shape is \(5, 2, 16\); allowed: \(at least 5, 2, 8\)"),
        ({"key": KEY.half()}, "key dtype is torch.float16"),
        ({"value": VALUE.to(META)}, "value device is meta"),
        ({"kv_cache": KEY}, "kv_cache is a tensor .* allowed: None with encoder"),
    ],
)
def test_keys_that_do_not_come_with_the_call(changes: dict[str, Any], words: str) -> None:
    arguments = {"key": KEY, "value": VALUE, "kv_cache": None, "device": CPU, "num_keys": 5}
    with pytest.raises(InvalidInputError, match=words):
        CallChecker(ENCODER).check_keys(**(arguments | changes))


def test_keys_beside_a_cache_may_be_any_number_and_none() -> None:
    checker = CallChecker(LAYER)
    checker.check_written_keys(None, None, CPU)
    checker.check_written_keys(KEY[:0], VALUE[:0], CPU)
    checker.check_written_keys(KEY, VALUE, CPU)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        (KEY, None, "value is None; allowed: a tensor where the other is one"),
        (None, VALUE, "key is None"),
        (KEY[:, :1], VALUE, r"key shape is \(5, 1, 16\)"),
        (KEY, KEY, r"value shape is \(5, 2, 16\)"),
        (KEY, VALUE.half(), "value dtype is torch.float16"),
        (KEY.to(META), VALUE, "key device is meta"),
    ],
)
def test_keys_that_cannot_be_in_the_cache(key: Any, value: Any, words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        CallChecker(LAYER).check_written_keys(key, value, CPU)


@pytest.mark.parametrize(
    ("option", "flag"), [("sinks", "has_sinks"), ("alibi_slopes", "has_alibi")]
)
def test_options_of_the_layer_object_are_those_it_was_described_with(
    option: str, flag: str
) -> None:
    with pytest.raises(UnsupportedOptionError, match=f"layer.{option} is given.*{flag}=False"):
        CallChecker(LAYER).check_layer(layer(**{option: torch.zeros(4)}), CPU)
    checker = CallChecker(replace(LAYER, **{flag: True}))
    checker.check_layer(layer(**{option: torch.zeros(4)}), CPU)
    for value, words in (
        (None, "is None; allowed: a tensor"),
        ([0.0], "is a list; allowed: a tensor"),
        (torch.zeros(3), r"shape is \(3,\); allowed: \(4,\)"),
        (torch.zeros(4).half(), "dtype is torch.float16; allowed: torch.float32"),
        (torch.zeros(4, device=META), "device is meta; allowed: cpu"),
    ):
        with pytest.raises(InvalidInputError, match=f"layer.{option} {words}"):
            checker.check_layer(layer(**{option: value}), CPU)


@pytest.mark.parametrize("scale", [0.5, torch.tensor(0.5), torch.tensor([1.0, 2.0])])
def test_a_scale_without_a_quantised_cache_is_refused(scale: Any) -> None:
    with pytest.raises(UnsupportedOptionError, match=r"layer\.v_scale=.* no such scale"):
        CallChecker(LAYER).check_layer(layer(v_scale=scale), CPU)
    with pytest.raises(UnsupportedOptionError, match=r"layer\.k_scale=.*int8_per_token_head"):
        CallChecker(INT8).check_layer(layer(k_scale=scale), CPU)


def test_a_scale_tensor_is_looked_at_again_when_it_is_another() -> None:
    checker = CallChecker(LAYER)
    checker.check_layer(layer(k_scale=torch.ones(1)), CPU)
    with pytest.raises(UnsupportedOptionError, match=r"layer\.k_scale"):
        checker.check_layer(layer(k_scale=torch.full((1,), 2.0)), CPU)


def test_scales_are_looked_at_again_when_they_are_others() -> None:
    checker = CallChecker(FP8)
    same = layer(k_scale=0.5, v_scale=torch.ones(2))
    checker.check_layer(same, CPU)
    checker.check_layer(same, CPU)
    with pytest.raises(InvalidInputError, match=r"layer\.v_scale shape"):
        checker.check_layer(layer(k_scale=0.5, v_scale=torch.ones(3)), CPU)
    with pytest.raises(InvalidInputError, match=r"layer\.k_scale is -1.0"):
        checker.check_layer(layer(k_scale=-1.0, v_scale=same.v_scale), CPU)
    with pytest.raises(InvalidInputError, match=r"layer\.k_scale is None"):
        CallChecker(FP8).check_layer(layer(k_scale=None, v_scale=None), CPU)


@pytest.mark.parametrize("scale", [0.5, torch.tensor(0.5), torch.tensor([1.0, 2.0])])
def test_scales_of_a_quantised_cache(scale: Any) -> None:
    CallChecker(FP8).check_layer(layer(k_scale=scale, v_scale=scale), CPU)


@pytest.mark.parametrize(
    ("scale", "words"),
    [
        (torch.ones(3), r"k_scale shape is \(3,\); allowed: .* of 2 \(kv heads\)"),
        (torch.ones(1, 2), r"k_scale shape is \(1, 2\)"),
        (0.0, "k_scale is 0.0; allowed: a positive finite number"),
        (float("inf"), "k_scale is inf"),
        ("1", "k_scale is '1'"),
    ],
)
def test_no_scales_of_a_quantised_cache(scale: Any, words: str) -> None:
    with pytest.raises(InvalidInputError, match=rf"layer\.{words}"):
        CallChecker(FP8).check_layer(layer(k_scale=scale), CPU)


WRONG: dict[str, list[Any]] = {
    "query": [QUERY[:5], QUERY[..., :8], QUERY[0], QUERY.half(), QUERY.to(META), None, [QUERY]],
    "output": [None, OUTPUT[:5], QUERY, OUTPUT.half(), OUTPUT.to(META), OUTPUT[0]],
    "key": [None, KEY[:0], VALUE, KEY[0], KEY.half(), KEY.to(META), KEY[:, :1], KEY.to_sparse()],
    "value": [None, VALUE[:2], KEY, VALUE[0], VALUE.half(), VALUE.to(META), "value"],
    "lse": [LSE, LSE[:3]],
    "num_tokens": [4, 7],
    "device": [META],
    "layer": [layer(k_scale=2.0), layer(sinks=torch.zeros(4))],
}
"""Each argument of a call in other forms, some of them right."""


def said(check: Callable[[], None]) -> str:
    """Return what a check refuses, or ""."""
    try:
        check()
    except AttnError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("returns_lse", [True, False])
@pytest.mark.parametrize("first", WRONG)
@pytest.mark.parametrize("second", WRONG)
def test_one_pass_refuses_what_the_checks_refuse_one_by_one(
    first: str, second: str, returns_lse: bool
) -> None:
    usual: dict[str, Any] = {"query": QUERY, "output": OUTPUT, "key": KEY, "value": VALUE}
    usual |= {"lse": None, "num_tokens": 6, "device": CPU, "layer": layer()}
    for one, other in product(WRONG[first], WRONG[second]):
        call = {**usual, first: one, second: other}

        def one_by_one(call: dict[str, Any] = call) -> None:
            checker = CallChecker(LAYER, returns_lse=returns_lse)
            tensors = (call[name] for name in ("query", "output", "lse", "num_tokens", "device"))
            checker.check_tensors(*tensors)
            checker.check_written_keys(call["key"], call["value"], call["device"])
            checker.check_layer(call["layer"], call["device"])

        def in_one_pass(call: dict[str, Any] = call) -> None:
            CallChecker(LAYER, returns_lse=returns_lse).check_call(**call)

        assert said(in_one_pass) == said(one_by_one), call


def test_a_batch_of_other_blocks_than_the_cache_has_is_refused() -> None:
    check_block_size(64, CACHE)
    check_block_size(None, CACHE)
    check_block_size(16, None)
    with pytest.raises(MetadataError, match="block_size is 16; allowed: 64, that of the layer"):
        check_block_size(16, CACHE)


@pytest.mark.parametrize("scale", [1, 0.5, torch.tensor(2.0), torch.tensor([1.0, 3.0])])
def test_takes_a_scale(scale: Any) -> None:
    check_scale("k_scale", scale, 2)


@pytest.mark.parametrize(
    "scale",
    [0.0, -1.0, float("nan"), "1", True, [1.0, 1.0], torch.ones(3), torch.tensor([1.0, 0.0])],
)
def test_refuses_a_scale(scale: Any) -> None:
    with pytest.raises(InvalidInputError, match="k_scale"):
        check_scale("k_scale", scale, 2)
