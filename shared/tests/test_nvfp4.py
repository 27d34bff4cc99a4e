"""Caches of 4 bits: the nearest value by search, packing and unpacking, and where the bytes lie."""

from __future__ import annotations

import pytest
import torch

from attn_shared.errors import InvalidInputError, InvalidRequestError
from attn_shared.kv_cache import KVCacheLayout, NVFP4AttentionSpec, spec_for
from attn_shared.kv_write import write_kv
from attn_shared.nvfp4 import BLOCK, E2M1_VALUES, dequantize_nvfp4, quantize_nvfp4
from attn_shared.request import AttentionRequest


def spec(**changes: object) -> NVFP4AttentionSpec:
    fields = {"block_size": 4, "num_kv_heads": 3, "head_size": 32, "head_size_v": 32}
    form = {"dtype": torch.uint8, "kv_cache_dtype": "nvfp4", "layout": "HND"}
    return NVFP4AttentionSpec(**{**fields, **form, **changes})  # type: ignore[arg-type]


def test_every_value_of_the_format_comes_back_exactly() -> None:
    row = torch.tensor([*E2M1_VALUES, *(-value for value in E2M1_VALUES)])
    packed, scales = quantize_nvfp4(row * 2.0, 2.0)
    assert scales.float().tolist() == [1.0]
    assert dequantize_nvfp4(packed, scales, 2.0).tolist() == (row * 2.0).tolist()
    # The first of two values is in the low half: 0 and 0.5 are the codes 0 and 1.
    assert packed.tolist()[:2] == [0x10, 0x32]


def test_each_value_is_stored_as_the_nearest_by_search() -> None:
    torch.manual_seed(0)
    x = torch.randn(7, 5, 64) * 3
    packed, scales = quantize_nvfp4(x, 0.5)
    found = dequantize_nvfp4(packed, scales, 0.5)

    table = torch.tensor([*E2M1_VALUES, *(-value for value in E2M1_VALUES[1:])])
    factor = scales.float().repeat_interleave(BLOCK, -1) * 0.5
    choices = factor[..., None] * table
    best = (choices - x[..., None]).abs().amin(-1)
    torch.testing.assert_close((found - x).abs(), best, rtol=1e-6, atol=1e-7)


def test_ties_go_to_the_even_code() -> None:
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    row = torch.tensor([*ties, 6.0, *(-tie for tie in ties), 0.0])
    packed, scales = quantize_nvfp4(row, 1.0)
    expected = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    signed = [*expected, 6.0, *(-value for value in expected), 0.0]
    assert dequantize_nvfp4(packed, scales, 1.0).tolist() == signed


def test_a_block_of_zeros_and_one_that_does_not_fit() -> None:
    row = torch.cat([torch.zeros(BLOCK), torch.full((BLOCK,), 1e6)])
    packed, scales = quantize_nvfp4(row, 1.0)
    found = dequantize_nvfp4(packed, scales, 1.0)
    assert found[:BLOCK].tolist() == [0.0] * BLOCK
    assert found[BLOCK:].tolist() == [6.0 * 448.0] * BLOCK


def test_what_is_no_block_or_does_not_belong_together_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"head size .*24.* multiple of 16"):
        quantize_nvfp4(torch.zeros(24), 1.0)
    packed, scales = quantize_nvfp4(torch.zeros(2, 32), 1.0)
    with pytest.raises(InvalidInputError, match=r"scales.shape .*\(2, 1\).*\(2, 2\)"):
        dequantize_nvfp4(packed, scales[:, :1], 1.0)
    with pytest.raises(InvalidInputError, match=r"torch\.uint8 and torch\.float8_e4m3fn"):
        dequantize_nvfp4(packed, scales.float(), 1.0)


def test_a_page_holds_each_heads_values_and_then_their_scales() -> None:
    form = spec()
    entry = 32 // 2 + 32 // 16
    assert form.shape(5) == (5, 2, 4, 3, entry)
    assert form.page_size_bytes == 2 * 4 * 3 * entry
    cache = form.allocate(5, "cpu")
    flat = torch.arange(5 * form.page_size_bytes) % 251
    cache = flat.to(torch.uint8).as_strided(cache.shape, cache.stride())
    views = form.split(cache)

    block, side, head, token = 3, 1, 2, 1
    start = block * form.page_size_bytes + (side * 3 + head) * 4 * entry
    values = flat[start + token * 16 : start + token * 16 + 16]
    behind = start + 4 * 16 + token * 2
    assert views.value[block, token, head].tolist() == values.tolist()
    assert views.value_scale is not None
    found = views.value_scale[block, token, head].view(torch.uint8)
    assert found.tolist() == flat[behind : behind + 2].tolist()
    # What trtllm-gen asks of scales: those of a page and head in a row.
    assert views.value_scale.transpose(1, 2)[block, head].is_contiguous()


def test_written_rows_read_back_as_they_were_packed() -> None:
    torch.manual_seed(0)
    form = spec()
    cache = form.allocate(3, "cpu")
    key, value = torch.randn(2, 5, 3, 32).bfloat16()
    slots = torch.tensor([4, 5, -1, 11, 0])
    write_kv(cache, form, key, value, slots, k_scale=0.5, v_scale=torch.tensor([2.0]))
    views = form.split(cache)
    for row, slot in enumerate(slots.tolist()):
        for rows, stored, scales, scale in (
            (key, views.key, views.key_scale, 0.5),
            (value, views.value, views.value_scale, 2.0),
        ):
            assert scales is not None
            place = (slot // 4, slot % 4)
            found = dequantize_nvfp4(stored[place], scales[place], scale)
            expected = dequantize_nvfp4(*quantize_nvfp4(rows[row], scale), scale)
            assert torch.equal(found, expected if slot >= 0 else found)
    assert not views.key[0, 1:].any()


def test_the_spec_follows_from_the_request_and_refuses_other_forms() -> None:
    request = AttentionRequest(
        num_heads=8, num_kv_heads=2, head_size=128, kv_cache_dtype="nvfp4", window=(7, 0)
    )
    found = spec_for(request, block_size=16, layout=KVCacheLayout.HND)
    assert isinstance(found, NVFP4AttentionSpec)
    assert found.shape(1)[-1] == 72
    assert found.is_quantized
    for changes, words in (
        ({"layout": "NHD"}, "HND with kv_cache_dtype='nvfp4'"),
        ({"head_size": 24, "head_size_v": 24}, "one multiple of 16"),
        ({"head_size_v": 64}, "one multiple of 16"),
        ({"dtype": torch.int8}, "uint8 with kv_cache_dtype='nvfp4'"),
    ):
        with pytest.raises(InvalidRequestError, match=words):
            spec(**changes)


def test_a_cache_in_another_order_is_refused() -> None:
    cache = spec().allocate(2, "cpu")
    with pytest.raises(InvalidInputError, match="strides of kv_cache"):
        spec().split(cache.contiguous())
