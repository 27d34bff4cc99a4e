"""Alike layers share one `Attention`; sinks belong to their module."""

from __future__ import annotations

import torch

from attn_shared.selection import Policy
from attn_transformers.layers import LayerKey, attention_for


def key(**options: object) -> LayerKey:
    plain: dict[str, object] = {
        "policy": Policy(),
        "is_checked": False,
        "device": torch.device("cpu"),
        "dtype": torch.float32,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_size": 8,
        "head_size_v": 8,
        "scale": 0.25,
        "window": (None, None),
        "softcap": None,
        "has_sinks": False,
        "is_causal": True,
    }
    return LayerKey(**plain | options)  # type: ignore[arg-type]


def test_alike_layers_are_one() -> None:
    modules = torch.nn.Module(), torch.nn.Module()
    assert attention_for(key(), modules[0], None) is attention_for(key(), modules[1], None)
    assert attention_for(key(), modules[0], None) is not attention_for(
        key(scale=0.5), modules[0], None
    )


def test_the_request_says_all_that_the_key_does() -> None:
    found = attention_for(
        key(window=(3, 0), softcap=2.0, head_size_v=6, block_size=32), torch.nn.Module(), None
    )
    request = found.request
    assert (request.window, request.softcap, request.value_size) == ((3, 0), 2.0, 6)
    assert (request.num_heads, request.num_kv_heads, request.block_size) == (4, 2, 32)
    assert found.spec.scale == 0.25


def test_sinks_are_a_modules_own_and_read_at_each_call() -> None:
    modules = torch.nn.Module(), torch.nn.Module()
    sinks = torch.zeros(4, dtype=torch.bfloat16)
    found = [attention_for(key(has_sinks=True), module, sinks) for module in modules]
    assert found[0] is not found[1]
    again = attention_for(key(has_sinks=True), modules[0], sinks + 1)
    assert again is found[0]
    assert again.sinks is not None
    assert again.sinks.dtype is torch.float32
    assert again.sinks.tolist() == [1.0] * 4
    assert found[1].sinks is not None
    assert found[1].sinks.tolist() == [0.0] * 4


def test_decoders_without_causality_ask_for_it() -> None:
    assert key(is_causal=False).build(None).request.non_causal
    assert not key().build(None).request.non_causal
