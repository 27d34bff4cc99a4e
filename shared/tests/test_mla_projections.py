"""Absorbed and expanded attention are one computation, in float64 and by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attn_shared.errors import InvalidInputError
from attn_shared.mla_projections import MLAProjections
from attn_shared.mla_reference import mla_attention
from attn_shared.reference import mla_absorb_query, mla_decode, mla_project_output
from attn_shared.request import MLADims

DIMS = MLADims(kv_lora_rank=12, qk_nope_head_dim=7, qk_rope_head_dim=4, v_head_dim=5)
HEADS = 3
STARTS, LENS = torch.tensor([0, 1, 5, 8], dtype=torch.int32), torch.tensor([9, 4, 0]).int()
TABLE = torch.tensor([[2, 0, 3], [1, 4, 7], [7, 7, 7]], dtype=torch.int32)


def weight(dtype: torch.dtype = torch.float64) -> torch.Tensor:
    rows = HEADS * (DIMS.qk_nope_head_dim + DIMS.v_head_dim)
    generator = torch.Generator().manual_seed(3)
    return torch.randn(rows, DIMS.kv_lora_rank, generator=generator).to(dtype)


def projections(dtype: torch.dtype = torch.float64) -> MLAProjections:
    return MLAProjections(weight(dtype), DIMS, HEADS)


def test_absorbed_equals_expanded_in_float64() -> None:
    generator = torch.Generator().manual_seed(5)
    query = torch.randn(8, HEADS, 11, generator=generator, dtype=torch.float64)
    cache = torch.randn(5, 4, DIMS.latent_size, generator=generator, dtype=torch.float64)
    batch: dict[str, Any] = {"query_start_loc": STARTS, "seq_lens": LENS, "block_table": TABLE}
    own = projections()
    absorbed = mla_decode(own.absorb(query), cache, scale=0.3, kv_lora_rank=12, **batch)
    output = torch.empty(8, HEADS, DIMS.v_head_dim, dtype=torch.float64)
    own.project(absorbed.output, output)
    expanded = mla_attention(query, cache, own.kv_b_proj, DIMS, scale=0.3, **batch)
    torch.testing.assert_close(output, expanded.output, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(absorbed.lse, expanded.lse, rtol=1e-12, atol=1e-12)


def test_rows_of_a_head_are_its_keys_and_then_its_values() -> None:
    own = projections()
    by_hand = weight().view(HEADS, 12, DIMS.kv_lora_rank)
    assert torch.equal(own.w_uk, by_hand[:, :7])
    assert torch.equal(own.w_uv, by_hand[:, 7:])
    assert own.w_uk.data_ptr() == own.kv_b_proj.data_ptr()


def test_a_weight_among_others_is_looked_at_where_it_is() -> None:
    wide = torch.randn(36, 40, dtype=torch.float64)
    own = MLAProjections(wide[:, 4:16], DIMS, HEADS)
    assert own.w_uk.data_ptr() == wide[:, 4:].data_ptr()
    query = torch.randn(4, HEADS, 11, dtype=torch.float64)
    dense = MLAProjections(wide[:, 4:16].contiguous(), DIMS, HEADS)
    torch.testing.assert_close(own.absorb(query), dense.absorb(query))


def test_products_are_those_of_the_reference() -> None:
    own, query = projections(), torch.randn(4, HEADS, 11, dtype=torch.float64)
    key_up = own.w_uk.permute(2, 0, 1)
    torch.testing.assert_close(own.absorb(query), mla_absorb_query(query, key_up))
    latents = torch.randn(4, HEADS, DIMS.kv_lora_rank, dtype=torch.float64)
    output = torch.empty(4, HEADS, DIMS.v_head_dim, dtype=torch.float64)
    own.project(latents, output)
    torch.testing.assert_close(output, mla_project_output(latents, own.w_uv.permute(2, 0, 1)))


def test_rows_by_themselves_have_the_bits_that_they_have_alone() -> None:
    own = projections(torch.bfloat16)
    query = torch.randn(9, HEADS, 11).bfloat16()
    together = own.absorb(query, [0, 2, 2, 9])
    for start, stop in ((0, 2), (2, 9)):
        assert torch.equal(own.absorb(query[start:stop], [0, stop - start]), together[start:stop])


@pytest.mark.parametrize("shape", [(36, 11), (35, 12), (72, 12), (12,)])
def test_a_weight_of_other_heads_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidInputError, match=r"kv_b_proj shape is .* allowed: \(36, 12\)"):
        MLAProjections(torch.zeros(shape), DIMS, HEADS)
