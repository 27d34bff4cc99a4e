from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
import torch
from attn_shared_fakes import request

from attn_shared.dtypes import KVCacheLayout
from attn_shared.errors import InvalidInputError, InvalidRequestError, UnknownNameError
from attn_shared.kv_cache import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    spec_for,
)
from attn_shared.request import MLADims

FN, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz


def spec(kind: type[AttentionSpec] = FullAttentionSpec, **options: Any) -> AttentionSpec:
    plain: dict[str, Any] = {
        "block_size": 16,
        "num_kv_heads": 2,
        "head_size": 64,
        "head_size_v": 64,
        "dtype": torch.float16,
    }
    return kind(**{**plain, **options})


INT8: dict[str, Any] = {"dtype": torch.int8, "kv_cache_dtype": "int8_per_token_head"}


@pytest.mark.parametrize(
    ("options", "shape", "strides", "page"),
    [
        # (num_blocks, 2, block_size, Hkv, D): 2 * 16 * 2 * 64 elements of 2 bytes
        ({}, (5, 2, 16, 2, 64), (4096, 2048, 128, 64, 1), 8192),
        ({"layout": "HND"}, (5, 2, 16, 2, 64), (4096, 2048, 64, 1024, 1), 8192),
        # D != Dv: both share the last dimension, 16 * 2 * (64 + 32) elements
        ({"head_size_v": 32}, (5, 16, 2, 96), (3072, 192, 96, 1), 6144),
        ({"head_size_v": 32, "layout": "HND"}, (5, 16, 2, 96), (3072, 96, 1536, 1), 6144),
        # int8: 64 values and a scale of 4 bytes
        (INT8, (5, 2, 16, 2, 68), (4352, 2176, 136, 68, 1), 4352),
        # 6 values, 2 bytes that align the scale, 4 of scale
        ({**INT8, "head_size": 6, "head_size_v": 6}, (5, 2, 16, 2, 12), (768, 384, 24, 12, 1), 768),
        # a width of 1 and one head: strides are those of any other size
        (
            {"head_size": 1, "head_size_v": 1, "num_kv_heads": 1, "layout": "HND"},
            (5, 2, 16, 1, 1),
            (32, 16, 1, 16, 1),
            64,
        ),
    ],
)
def test_shape_strides_and_bytes_by_hand(
    options: dict[str, Any], shape: tuple[int, ...], strides: tuple[int, ...], page: int
) -> None:
    found = spec(**options)
    assert found.shape(5) == shape
    assert found.strides(5) == strides
    assert found.page_size_bytes == page
    cache = found.allocate(5, "cpu")
    assert (cache.shape, cache.stride()) == (shape, strides)
    assert cache.untyped_storage().nbytes() == 5 * page
    single = found.allocate(1, "cpu")
    assert (single.shape, single.stride()) == ((1, *shape[1:]), strides)
    assert single.untyped_storage().nbytes() == page


@pytest.mark.parametrize("options", [{}, {"head_size_v": 32}, INT8])
def test_a_layout_is_an_order_in_memory(options: dict[str, Any]) -> None:
    nhd = spec(**options).split(spec(**options).allocate(2, "cpu")).key
    hnd_spec = spec(layout="HND", **options)
    hnd = hnd_spec.split(hnd_spec.allocate(2, "cpu")).key
    assert nhd.shape == hnd.shape == (2, 16, 2, 64)
    assert nhd.stride(1) > nhd.stride(2)  # tokens outside heads
    assert hnd.stride(1) < hnd.stride(2)  # heads outside tokens


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("head_size_v", [64, 32])
def test_views_are_dense_in_the_last_dimension_and_share_memory(
    layout: str, head_size_v: int
) -> None:
    found = spec(layout=layout, head_size_v=head_size_v, page_size_padded=16384)
    cache = found.allocate(3, "cpu")
    views = found.split(cache)
    assert views.key.shape == (3, 16, 2, 64)
    assert views.value.shape == (3, 16, 2, head_size_v)
    assert views.key.stride(-1) == views.value.stride(-1) == 1
    assert views.key_scale is views.value_scale is None
    views.key.fill_(1)
    views.value.fill_(2)
    assert cache.float().sum() == 3 * 16 * 2 * (64 + 2 * head_size_v)
    assert views.key.data_ptr() == cache.data_ptr()


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("widths", [(64, 64), (6, 6), (6, 13)])
def test_scales_end_their_entry(layout: str, widths: tuple[int, int]) -> None:
    found = spec(layout=layout, head_size=widths[0], head_size_v=widths[1], **INT8)
    cache = found.allocate(2, "cpu")
    views = found.split(cache)
    assert (views.key.shape[-1], views.value.shape[-1]) == widths
    assert views.key_scale is not None
    assert views.value_scale is not None
    assert views.key_scale.dtype is views.value_scale.dtype is torch.float32
    assert views.key_scale.shape == views.value_scale.shape == (2, 16, 2)
    views.key_scale.fill_(0.5)
    views.value_scale.fill_(0.25)
    assert not views.key.any()
    assert not views.value.any()
    # 0.5 is 3f000000, 0.25 is 3e800000: the set bytes are 63 twice, -128 once, per entry
    assert cache.float().sum() == 2 * 16 * 2 * (63 + 62 - 128)


def test_scales_need_aligned_strides() -> None:
    found = spec(head_size=4, head_size_v=4, **INT8)
    shifted = torch.zeros(2 * 2 * 16 * 2 * 8 + 1, dtype=torch.int8)[1:].view(2, 2, 16, 2, 8)
    with pytest.raises(InvalidInputError, match=r"strides of kv_cache .* multiples of 4 bytes"):
        found.split(shifted)
    with pytest.raises(InvalidRequestError, match=r"page_size_padded=514 .* a multiple of 4 bytes"):
        replace(found, page_size_padded=514)


@pytest.mark.parametrize("field", ["num_kv_heads", "head_size", "head_size_v"])
def test_heads_are_positive(field: str) -> None:
    zero: dict[str, Any] = {field: 0}
    with pytest.raises(InvalidRequestError, match=f"{field}=0 is not allowed"):
        spec(**zero)


def test_a_layout_may_be_named_and_nothing_else() -> None:
    assert spec(layout="HND") == spec(layout=KVCacheLayout.HND)
    with pytest.raises(UnknownNameError, match="unknown layout 'NDH'; allowed: HND, NHD"):
        spec(layout="NDH")


def test_specs_are_frozen_values_of_their_kind() -> None:
    assert spec() == spec()
    assert hash(spec()) == hash(spec())
    assert spec() != spec(CrossAttentionSpec)
    assert len({spec(), spec(), spec(block_size=32)}) == 2
    assert pickle.loads(pickle.dumps(spec())) == spec()
    assert repr(spec()).startswith("FullAttentionSpec(block_size=16, ")
    with pytest.raises(FrozenInstanceError):
        spec().block_size = 32  # type: ignore[misc]
    with pytest.raises((AttributeError, TypeError)):  # which one depends on Python's release
        spec().note = "x"  # type: ignore[attr-defined]


def test_a_sliding_window_bounds_memory() -> None:
    found = spec(SlidingWindowSpec, window_left=4095)
    assert isinstance(found, SlidingWindowSpec)
    # 4095 earlier keys and 8192 of one step: 12287 tokens in 768 blocks, one more at a boundary
    assert found.max_memory_bytes(131072) == 769 * 8192
    assert found.max_memory_bytes(131072, max_num_batched_tokens=1) == (256 + 1) * 8192
    assert found.max_memory_bytes(100) == (7 + 1) * 8192
    with pytest.raises(InvalidRequestError, match=r"window=\(-1, 0\)"):
        spec(SlidingWindowSpec, window_left=-1)


def test_a_chunk_bounds_memory() -> None:
    found = spec(ChunkedLocalAttentionSpec, chunk_size=8192)
    assert found.max_memory_bytes(131072) == 1024 * 8192
    assert found.max_memory_bytes(100) == 7 * 8192
    with pytest.raises(InvalidRequestError, match="chunk_size=0"):
        spec(ChunkedLocalAttentionSpec, chunk_size=0)


def test_an_encoder_keeps_nothing() -> None:
    assert spec(EncoderOnlyAttentionSpec).max_memory_bytes(131072) == 0


def test_latents_are_kept_once() -> None:
    found = MLAAttentionSpec(block_size=64, head_size=576, kv_lora_rank=512, dtype=torch.bfloat16)
    assert found.page_size_bytes == 64 * 576 * 2
    cache = found.allocate(2, "cpu")
    assert (cache.shape, cache.stride()) == ((2, 64, 576), (36864, 576, 1))
    views = found.split(cache)
    assert views.key.shape == (2, 64, 1, 576)
    assert views.value.shape == (2, 64, 1, 512)
    assert views.key.data_ptr() == views.value.data_ptr() == cache.data_ptr()
    padded = replace(found, page_size_padded=36864 * 2 + 64)
    assert padded.allocate(2, "cpu").stride() == (36896, 576, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_lora_rank": 577}, "kv_lora_rank=577 .* at most head_size=576"),
        ({"kv_lora_rank": 0}, "kv_lora_rank=0 .*int >= 1"),
        ({"head_size": 0}, "head_size=0 .*int >= 1"),
        ({"kv_cache_dtype": "fp8_ds_mla", "dtype": torch.uint8}, "kv_cache_dtype='fp8_ds_mla'"),
    ],
)
def test_a_latent_is_part_of_its_entry(options: dict[str, Any], message: str) -> None:
    plain = {"block_size": 64, "head_size": 576, "kv_lora_rank": 512, "dtype": torch.bfloat16}
    with pytest.raises(InvalidRequestError, match=message):
        MLAAttentionSpec(**{**plain, **options})


def test_a_recurrent_state_by_hand() -> None:
    shapes, dtypes = ((3, 4), (2, 5, 6)), (torch.bfloat16, torch.float32)
    state = MambaSpec(block_size=256, shapes=shapes, dtypes=dtypes)
    assert state.page_size_bytes == 3 * 4 * 2 + 2 * 5 * 6 * 4
    assert replace(state, page_size_padded=512).page_size_bytes == 512
    with pytest.raises(InvalidRequestError, match=r"page_size_padded=256 .* at least 264"):
        replace(state, page_size_padded=256)
    with pytest.raises(InvalidRequestError, match=r"dtypes=.* allowed: 2, one for each of shapes"):
        MambaSpec(block_size=256, shapes=shapes, dtypes=(torch.float32,))


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({}, FullAttentionSpec),
        ({"window": (127, 0)}, SlidingWindowSpec),
        ({"window": (127, 127), "non_causal": True}, SlidingWindowSpec),
        ({"window": (None, 0)}, FullAttentionSpec),
        # a multimodal range reaches beyond window and chunk: nothing may be dropped
        ({"window": (127, 0), "use_mm_prefix": True}, FullAttentionSpec),
        ({"chunk_size": 8192, "use_mm_prefix": True}, FullAttentionSpec),
        ({"chunk_size": 8192}, ChunkedLocalAttentionSpec),
        ({"attn_type": "encoder_decoder"}, CrossAttentionSpec),
        ({"attn_type": "encoder"}, EncoderOnlyAttentionSpec),
        ({"attn_type": "encoder_only", "window": (7, 7)}, EncoderOnlyAttentionSpec),
    ],
)
def test_a_request_gets_the_spec_that_keeps_what_it_sees(
    options: dict[str, Any], kind: type[AttentionSpec]
) -> None:
    found = spec_for(request(dtype="float16", **options), block_size=32, layout=KVCacheLayout.HND)
    assert type(found) is kind
    assert found.block_size == 32
    assert isinstance(found, AttentionSpec)
    assert (found.num_kv_heads, found.head_size, found.head_size_v) == (2, 64, 64)
    assert (found.dtype, found.layout) == (torch.float16, KVCacheLayout.HND)


def test_window_and_chunk_travel_to_the_spec() -> None:
    window = spec_for(request(window=(127, 0)), block_size=16)
    assert isinstance(window, SlidingWindowSpec)
    assert window.window_left == 127
    chunk = spec_for(request(chunk_size=8192), block_size=16)
    assert isinstance(chunk, ChunkedLocalAttentionSpec)
    assert chunk.chunk_size == 8192


def test_the_format_travels_to_the_spec_in_the_devices_flavour() -> None:
    asked = request(kv_cache_dtype="fp8", head_size_v=32)
    assert spec_for(asked, block_size=16).dtype is FN
    found = spec_for(asked, block_size=16, fp8_e4m3_dtype=FNUZ)
    assert (found.dtype, found.kv_cache_dtype) == (FNUZ, "fp8")
    assert isinstance(found, AttentionSpec)
    assert found.is_packed


def test_a_request_for_latents_gets_a_spec_for_them() -> None:
    dims = MLADims(kv_lora_rank=96, qk_rope_head_dim=32)
    found = spec_for(request(mla=dims, num_kv_heads=1, head_size=128), block_size=64)
    assert found == MLAAttentionSpec(
        block_size=64, head_size=128, kv_lora_rank=96, dtype=torch.bfloat16
    )


def test_a_packed_format_has_no_spec() -> None:
    with pytest.raises(InvalidRequestError, match="kv_cache_dtype='turboquant_k8v4'"):
        spec_for(request(kv_cache_dtype="turboquant_k8v4"), block_size=16)
