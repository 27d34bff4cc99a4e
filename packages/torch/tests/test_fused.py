"""The fast path against the exact one, in each of its shapes."""

from __future__ import annotations

import pytest
import torch

from attn_torch._exact import ExactOptions, exact_attention
from attn_torch._fused import fused_attention, is_fused


def _tensors(
    requests: int, rows: int, keys: int, heads: int, kv_heads: int, width: int, width_v: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return (
        torch.randn(requests, rows, heads, width, generator=generator),
        torch.randn(requests, keys, kv_heads, width, generator=generator),
        torch.randn(requests, keys, kv_heads, width_v, generator=generator),
    )


def _check(tensors: tuple[torch.Tensor, ...], mask: torch.Tensor | None, **options) -> None:
    query, key, value = tensors
    got = fused_attention(query, key, value, scale=0.3, mask=mask, **options)
    if options.get("is_square_causal"):
        mask = torch.ones(query.shape[1], key.shape[1], dtype=torch.bool).tril().unsqueeze(0)
    wide = ExactOptions(scale=0.3, accumulate=torch.float64)
    expected, _ = exact_attention(query, key, value, wide, mask=mask)
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=1e-5)


HEADS = pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (5, 1)])
WIDTHS = pytest.mark.parametrize(("width", "width_v"), [(8, 8), (8, 3), (3, 8), (1, 1)])


@HEADS
@WIDTHS
@pytest.mark.parametrize("rows", [1, 3, 70])
def test_without_a_mask(heads, kv_heads, width, width_v, rows):
    _check(_tensors(2, rows, 5, heads, kv_heads, width, width_v), None)


@HEADS
@WIDTHS
@pytest.mark.parametrize("rows", [1, 3, 70])
@pytest.mark.parametrize("masks", [1, 2])
def test_with_a_mask_for_all_or_for_each_request(heads, kv_heads, width, width_v, rows, masks):
    mask = torch.rand(masks, rows, 5, generator=torch.Generator().manual_seed(2)) < 0.5
    mask[..., 0] = True
    _check(_tensors(2, rows, 5, heads, kv_heads, width, width_v), mask)


@HEADS
@WIDTHS
def test_square_causal(heads, kv_heads, width, width_v):
    _check(_tensors(1, 5, 5, heads, kv_heads, width, width_v), None, is_square_causal=True)
    _check(_tensors(2, 5, 5, heads, kv_heads, width, width_v), None, is_square_causal=True)


def test_keys_of_any_strides_are_read_where_they_lie():
    query, key, value = _tensors(1, 2, 6, 4, 2, 8, 8)
    both = torch.stack([key, value], dim=-2)
    head_major = value.transpose(1, 2).contiguous().transpose(1, 2)
    _check((query, both[..., 0, :], head_major), None)


def test_where_torch_may_fall_back_to_whole_matrices():
    assert is_fused(torch.device("cpu"))
    assert is_fused(torch.device("cuda"))
    assert not is_fused(torch.device("xpu"))
