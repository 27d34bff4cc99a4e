from __future__ import annotations

from typing import Any

import pytest
import torch

from attn_shared.dtypes import KVQuantMode
from attn_shared.errors import InvalidInputError, InvalidRequestError
from attn_shared.kv_cache import FullAttentionSpec, MLAAttentionSpec
from attn_shared.paged_spec import PagedSpec

FN, FNUZ, E5M2 = torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2


def full(**options: Any) -> FullAttentionSpec:
    plain: dict[str, Any] = {
        "block_size": 16,
        "num_kv_heads": 2,
        "head_size": 64,
        "head_size_v": 64,
        "dtype": torch.bfloat16,
    }
    return FullAttentionSpec(**{**plain, **options})


def latent(**options: Any) -> MLAAttentionSpec:
    plain: dict[str, Any] = {
        "block_size": 64,
        "head_size": 576,
        "kv_lora_rank": 512,
        "dtype": torch.bfloat16,
    }
    return MLAAttentionSpec(**{**plain, **options})


@pytest.mark.parametrize("size", [0, -16, 16.0, True, "16"])
def test_a_block_holds_a_positive_number_of_tokens(size: object) -> None:
    for make in (full, latent):
        with pytest.raises(InvalidRequestError, match=f"block_size={size!r} .*int >= 1"):
            make(block_size=size)


@pytest.mark.parametrize(
    ("tokens", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (10**18 + 1, 62500000000000001)]
)
def test_a_sequence_needs_whole_blocks(tokens: int, blocks: int) -> None:
    assert full().num_blocks_for(tokens) == blocks


def test_a_sequence_of_greatest_length_by_hand() -> None:
    # 2 (K and V) * 16 tokens * 2 heads * 64 elements * 2 bytes
    assert full().page_size_bytes == 8192
    assert full().max_memory_bytes(100) == 7 * 8192


@pytest.mark.parametrize(
    ("name", "dtype", "is_quantized"),
    [
        ("auto", torch.float16, False),
        ("auto", torch.float32, False),
        ("bfloat16", torch.bfloat16, False),
        ("fp8", FN, True),
        ("fp8_e4m3", FNUZ, True),
        ("fp8_e5m2", E5M2, True),
        ("int8_per_token_head", torch.int8, True),
    ],
)
def test_a_format_goes_with_its_dtypes(name: str, dtype: torch.dtype, is_quantized: bool) -> None:
    assert full(kv_cache_dtype=name, dtype=dtype).is_quantized is is_quantized


@pytest.mark.parametrize(
    ("name", "dtype", "message"),
    [
        ("fp8", torch.float16, "dtype=torch.float16 .* float8_e4m3fn or float8_e4m3fnuz with"),
        ("fp8", E5M2, "dtype=torch.float8_e5m2 .* kv_cache_dtype='fp8'"),
        ("auto", FN, "dtype=torch.float8_e4m3fn .* float16 or bfloat16 or float32"),
        ("float16", torch.bfloat16, "dtype=torch.bfloat16 .* float16 with"),
        ("int8_per_token_head", torch.uint8, "dtype=torch.uint8 .* int8 with"),
        ("nvfp4", torch.uint8, "kv_cache_dtype='nvfp4' .* packed format needs a backend"),
    ],
)
def test_a_format_refuses_other_dtypes(name: str, dtype: torch.dtype, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        full(kv_cache_dtype=name, dtype=dtype)


def test_the_quantisation_follows_from_the_format() -> None:
    assert full().quant_mode is KVQuantMode.NONE
    assert latent(kv_cache_dtype="fp8", dtype=FN).quant_mode is KVQuantMode.FP8_PER_TENSOR


@pytest.mark.parametrize("num_blocks", [1, 3])
def test_padding_stands_between_blocks(num_blocks: int) -> None:
    spec = full(page_size_padded=8192 + 128)
    cache = spec.allocate(num_blocks, "cpu")
    assert spec.page_size_bytes == 8320
    assert cache.shape == (num_blocks, 2, 16, 2, 64)
    assert cache.stride() == (4160, 2048, 128, 64, 1)
    assert cache.untyped_storage().nbytes() == num_blocks * 8320


@pytest.mark.parametrize(
    ("make", "padded", "message"),
    [
        (full, 8190, "page_size_padded=8190 .* a multiple of 2 bytes, at least 8192"),
        (full, 8193, "page_size_padded=8193 .* a multiple of 2 bytes, at least 8192"),
        (full, 0, "page_size_padded=0 .*int >= 1"),
        (latent, 64, "page_size_padded=64 .* a multiple of 2 bytes, at least 73728"),
    ],
)
def test_padding_holds_the_entries_in_whole_elements(make: Any, padded: int, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        make(page_size_padded=padded)


def test_a_cache_is_zeros_on_its_device() -> None:
    cache = full().allocate(2, "cpu")
    assert cache.device.type == "cpu"
    assert cache.dtype is torch.bfloat16
    assert not cache.any()
    assert full().allocate(2, torch.device("meta")).device.type == "meta"


@pytest.mark.parametrize("num_blocks", [0, -1, 2.0, True])
def test_a_cache_has_a_positive_number_of_blocks(num_blocks: Any) -> None:
    for spec in (full(), latent()):
        with pytest.raises(InvalidRequestError, match=f"num_blocks={num_blocks!r} .*int >= 1"):
            spec.allocate(num_blocks, "cpu")


@pytest.mark.parametrize(
    ("spec", "cache", "message"),
    [
        (
            full(),
            torch.zeros(3, 2, 16, 2, 64, dtype=torch.float16),
            r"kv_cache dtype is float16; allowed: bfloat16 \(kv_cache_dtype='auto'\)",
        ),
        (
            full(kv_cache_dtype="fp8", dtype=FN),
            torch.zeros(3, 2, 16, 2, 64, dtype=FNUZ),
            r"kv_cache dtype is float8_e4m3fnuz; .*float8_e4m3fn .* only in the flavour",
        ),
        (
            full(),
            torch.zeros(2, 3, 16, 2, 64, dtype=torch.bfloat16),
            r"kv_cache shape is \(2, 3, 16, 2, 64\); allowed: \(num_blocks, 2, 16, 2, 64\)",
        ),
        (full(), torch.zeros((), dtype=torch.bfloat16), r"kv_cache shape is \(\)"),
        (full(), torch.zeros(9, dtype=torch.bfloat16), r"kv_cache shape is \(9,\)"),
        (
            full(),
            torch.zeros(3, 2, 16, 2, 128, dtype=torch.bfloat16)[..., ::2],
            "the last stride of kv_cache is 2; allowed: 1",
        ),
        (
            latent(),
            torch.zeros(3, 32, 576, dtype=torch.bfloat16),
            r"kv_cache shape is \(3, 32, 576\); allowed: \(num_blocks, 64, 576\)",
        ),
        (latent(), torch.zeros(3, 64, 576), "kv_cache dtype is float32; allowed: bfloat16"),
    ],
)
def test_another_cache_is_refused(spec: PagedSpec, cache: torch.Tensor, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        spec.split(cache)


@pytest.mark.parametrize("num_blocks", [0, 1, 7])
def test_any_number_of_blocks_and_any_layout_passes(num_blocks: int) -> None:
    dense = torch.zeros(num_blocks, 2, 16, 2, 64, dtype=torch.bfloat16)
    full().check(dense)
    full().check(dense.transpose(2, 3).contiguous().transpose(2, 3))


def test_a_head_of_one_element_has_no_stride_to_object_to() -> None:
    spec = full(head_size=1, head_size_v=1)
    spec.check(torch.zeros(3, 2, 16, 2, 9, dtype=torch.bfloat16)[..., :1])
    spec.check(torch.zeros(3, 2, 16, 2, 9, dtype=torch.bfloat16)[..., ::9])
