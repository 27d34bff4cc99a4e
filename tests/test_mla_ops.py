"""The operators of latent attention: eager, compiled, and with fake tensors."""

from __future__ import annotations

import pytest
import torch
from mla_cases import BLOCK, DIMS, case, layer

from attn_shared.errors import InvalidInputError
from attn_shared.kv_cache import MLAAttentionSpec
from attn_shared.kv_write import concat_and_cache_mla
from attn_shared.ops import attend_latents, step
from attn_shared.ops import concat_and_cache_mla as op

SLOTS = torch.tensor([3, -1, 0, 9])


def spec(dtype: torch.dtype, name: str) -> MLAAttentionSpec:
    return MLAAttentionSpec(
        block_size=BLOCK,
        head_size=DIMS.latent_size,
        kv_lora_rank=DIMS.kv_lora_rank,
        dtype=dtype,
        kv_cache_dtype=name,
    )


@pytest.mark.parametrize(
    ("dtype", "name", "scale"),
    [
        (torch.float32, "auto", 1.0),
        (torch.bfloat16, "bfloat16", 1.0),
        (torch.float8_e4m3fn, "fp8_e4m3", 0.1),
        (torch.float8_e5m2, "fp8_e5m2", 0.5),
    ],
)
def test_the_operator_writes_what_the_function_writes(
    dtype: torch.dtype, name: str, scale: float
) -> None:
    format_ = spec(dtype, name)
    latent, rope = torch.randn(4, DIMS.kv_lora_rank), torch.randn(4, DIMS.qk_rope_head_dim)
    expected, found = format_.allocate(3, "cpu"), format_.allocate(3, "cpu")
    concat_and_cache_mla(expected, format_, latent, rope, SLOTS, scale=scale)
    op(latent, rope, found, SLOTS, None if scale == 1.0 else torch.tensor([scale]))
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
    assert found.view(torch.uint8).any()


def test_the_operators_keep_torchs_rules() -> None:
    latent, rope = torch.randn(4, DIMS.kv_lora_rank), torch.randn(4, DIMS.qk_rope_head_dim)
    cache = spec(torch.float32, "auto").allocate(3, "cpu")
    torch.library.opcheck(op, (latent, rope, cache, SLOTS))


def test_a_cache_of_another_rank_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="shapes of kv_cache and latent"):
        op(torch.zeros(1, 4), torch.zeros(1, 2), torch.zeros(3, 6), torch.zeros(1).long())


def test_entries_of_another_width_are_refused() -> None:
    cache = spec(torch.float32, "auto").allocate(3, "cpu")
    with pytest.raises(InvalidInputError, match="rope shape"):
        op(torch.zeros(4, DIMS.kv_lora_rank), torch.zeros(4, 3), cache, SLOTS)


def test_a_compiled_graph_calls_the_layer_as_one_operator() -> None:
    attn = layer()
    batch = case(attn, [1, 1, 20], [9, 30, 24])
    plan = attn.plan(batch.common)
    expected = attn.forward(batch.query, batch.latent, batch.rope, batch.kv_cache.clone(), plan)

    def model(*tensors: torch.Tensor) -> torch.Tensor:
        return attend_latents(attn, *tensors) * 2

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with step(plan):
        found = compiled(batch.query, batch.latent, batch.rope, batch.kv_cache)
    assert torch.equal(found, expected * 2)
    assert batch.report(found / 2, None).ok
