"""Odd arguments of `MLAAttention`: refused by name, before a cache is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from attn_shared import Attention, CommonAttentionMetadata, MLAAttention
from attn_shared.errors import InvalidInputError, InvalidRequestError, MetadataError
from attn_shared.request import MLADims

DIMS = MLADims(kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8)


def layer(**options: Any) -> MLAAttention:
    asked: dict[str, Any] = {"dims": DIMS, "kv_b_proj": torch.ones(2 * 16, 16), **options}
    return MLAAttention(
        num_heads=2, scale=0.3, dtype=torch.float32, backend="TORCH_MLA", block_size=16, **asked
    )


def batch() -> CommonAttentionMetadata:
    """A decode and a prompt of 12 tokens, which TORCH_MLA prefills."""
    table = torch.tensor([[0, 1], [2, 3]])
    return CommonAttentionMetadata.from_lengths(
        query_lens=[1, 12], seq_lens=[20, 12], block_table=table, block_size=16
    )


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"dims": (16, 8, 4, 8)}, r"dims=\(16, 8, 4, 8\) is not allowed; allowed: an MLADims"),
        ({"head_size": 20}, "head_size=20 is not set by hand: it follows from dims"),
        ({"num_kv_heads": 2}, "num_kv_heads=2 is not set by hand"),
        ({"mla": DIMS}, "mla=.* is not set by hand"),
        ({"has_sinks": True}, "has_sinks is not set: this layer takes no sinks"),
        ({"prefill": 5}, "prefill=5 is not allowed"),
    ],
)
def test_odd_options_are_refused(asked: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        layer(**asked)


@pytest.mark.parametrize("call", ["plan", "plan_for_capture"])
def test_a_batch_of_another_kind_is_refused(call: str) -> None:
    with pytest.raises(MetadataError, match="common is a NoneType"):
        getattr(layer(), call)(None)


def step() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.ones(13, 2, 12), torch.ones(13, 16), torch.ones(13, 4)


def test_a_plan_of_an_ordinary_layer_is_refused_before_the_cache_is_written() -> None:
    mla, common = layer(), batch()
    other = Attention(
        num_heads=2,
        num_kv_heads=1,
        head_size=20,
        dtype=torch.float32,
        device="cpu",
        backend="TORCH_SDPA",
        block_size=16,
    )
    kv_cache = mla.allocate(4)
    with pytest.raises(InvalidInputError, match="allowed: an MLAMetadata"):
        mla.forward(*step(), kv_cache, other.plan(common))
    assert not kv_cache.any()


@pytest.mark.parametrize("call", ["forward", "update", "decode"])
def test_a_plan_of_another_backend_is_refused_before_the_cache_is_written(call: str) -> None:
    mla, kv_cache = layer(), layer().allocate(4)
    plan = mla.plan(batch())
    foreign = replace(plan, metadata=replace(plan.metadata, decode=object()))
    query, latent, rope = step()
    calls: dict[str, Callable[[], object]] = {
        "forward": lambda: mla.forward(query, latent, rope, kv_cache, foreign),
        "update": lambda: mla.update(latent, rope, kv_cache, foreign),
        "decode": lambda: mla.decode(torch.ones(13, 2, 20), kv_cache, foreign),
    }
    with pytest.raises(InvalidInputError, match="allowed: a TorchMLADecode, which the builder"):
        calls[call]()
    assert not kv_cache.any()


@pytest.mark.parametrize("call", ["forward", "update", "decode"])
def test_a_cache_with_too_few_blocks_is_refused_before_it_is_written(call: str) -> None:
    mla, kv_cache = layer(), layer().allocate(1)
    plan = mla.plan(batch())
    query, latent, rope = step()
    calls: dict[str, Callable[[], object]] = {
        "forward": lambda: mla.forward(query, latent, rope, kv_cache, plan),
        "update": lambda: mla.update(latent, rope, kv_cache, plan),
        "decode": lambda: mla.decode(torch.ones(13, 2, 20), kv_cache, plan),
    }
    with pytest.raises(InvalidInputError, match="kv_cache blocks is 1; allowed: at least"):
        calls[call]()
    assert not kv_cache.any()


@pytest.mark.parametrize("kv_cache", [None, (torch.zeros(4, 16, 20),)])
def test_a_cache_that_is_no_tensor_is_refused(kv_cache: Any) -> None:
    mla = layer()
    with pytest.raises(InvalidInputError, match=r"kv_cache is a .*; allowed: a tensor"):
        mla.forward(*step(), kv_cache, mla.plan(batch()))


def test_decode_refuses_a_plan_with_prefills() -> None:
    mla = layer()
    with pytest.raises(InvalidInputError, match="a batch with 12 rows that are prefills"):
        mla.decode(torch.ones(13, 2, 20), mla.allocate(4), mla.plan(batch()))


def test_what_is_no_plan_is_refused() -> None:
    mla, nothing = layer(), torch.empty(0)
    plan: Any = None
    with pytest.raises(InvalidInputError, match="plan is a NoneType"):
        mla.decode(torch.ones(1, 2, 20), mla.allocate(4), plan)
    with pytest.raises(InvalidInputError, match="plan is a NoneType"):
        mla.update(nothing, nothing, mla.allocate(4), plan)


def test_latents_that_are_none_are_refused() -> None:
    mla, nothing = layer(), None
    absent: Any = nothing
    with pytest.raises(InvalidInputError, match="latent is a NoneType; allowed: a tensor"):
        mla.update(absent, absent, mla.allocate(4), mla.plan(batch()))
