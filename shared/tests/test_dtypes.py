from __future__ import annotations

import pytest
import torch

from attn_shared.dtypes import (
    COMPUTE_DTYPES,
    KV_CACHE_DTYPES,
    KVQuantMode,
    dtype_name,
    kv_quant_mode,
    kv_storage_dtype,
    kv_storage_dtypes,
    parse_dtype,
    parse_kv_cache_dtype,
)
from attn_shared.errors import InvalidRequestError, UnknownNameError

FN, FNUZ, E5M2 = torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("float16", torch.float16),
        ("half", torch.float16),
        ("fp16", torch.float16),
        ("bfloat16", torch.bfloat16),
        ("bf16", torch.bfloat16),
        ("BF16", torch.bfloat16),
        ("float32", torch.float32),
        ("float", torch.float32),
        ("torch.float16", torch.float16),
        (torch.float32, torch.float32),
    ],
)
def test_compute_dtypes_by_any_of_their_names(name: str | torch.dtype, dtype: torch.dtype) -> None:
    assert parse_dtype(name) is dtype


@pytest.mark.parametrize("name", ["float8", "fp64", "", torch.float64, torch.int8])
def test_another_dtype_is_refused_with_the_valid_ones(name: str | torch.dtype) -> None:
    with pytest.raises(UnknownNameError, match="allowed: bfloat16, float16, float32"):
        parse_dtype(name)


def test_dtype_names_have_no_prefix() -> None:
    assert dtype_name(torch.bfloat16) == "bfloat16"
    assert [dtype_name(dtype) for dtype in COMPUTE_DTYPES.values()] == list(COMPUTE_DTYPES)


def test_cache_dtype_names_pass_unchanged() -> None:
    assert [parse_kv_cache_dtype(name) for name in KV_CACHE_DTYPES] == list(KV_CACHE_DTYPES)


@pytest.mark.parametrize("name", ["fp8_e4m3fn", "int8", "AUTO", torch.float16, None])
def test_an_unknown_cache_dtype_is_refused_with_the_valid_ones(name: str) -> None:
    with pytest.raises(UnknownNameError, match=r"unknown kv_cache_dtype .*allowed: auto, "):
        parse_kv_cache_dtype(name)


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("auto", KVQuantMode.NONE),
        ("float16", KVQuantMode.NONE),
        ("bfloat16", KVQuantMode.NONE),
        ("float32", KVQuantMode.NONE),
        ("fp8", KVQuantMode.FP8_PER_TENSOR),
        ("fp8_e4m3", KVQuantMode.FP8_PER_TENSOR),
        ("fp8_e5m2", KVQuantMode.FP8_PER_TENSOR),
        ("fp8_inc", KVQuantMode.FP8_PER_TENSOR),
        ("fp8_ds_mla", KVQuantMode.FP8_DS_MLA),
        ("int4_per_token_head", KVQuantMode.INT4_PER_TOKEN_HEAD),
        ("int8_per_token_head", KVQuantMode.INT8_PER_TOKEN_HEAD),
        ("fp8_per_token_head", KVQuantMode.FP8_PER_TOKEN_HEAD),
        ("nvfp4", KVQuantMode.NVFP4),
        ("turboquant_k8v4", KVQuantMode.TURBOQUANT),
        ("turboquant_4bit_nc", KVQuantMode.TURBOQUANT),
        ("turboquant_k3v4_nc", KVQuantMode.TURBOQUANT),
        ("turboquant_3bit_nc", KVQuantMode.TURBOQUANT),
    ],
)
def test_each_format_has_its_quantisation(name: str, mode: KVQuantMode) -> None:
    assert kv_quant_mode(name) is mode


def test_the_table_above_misses_no_format() -> None:
    assert len(KV_CACHE_DTYPES) == len(set(KV_CACHE_DTYPES)) == 17


@pytest.mark.parametrize(
    ("name", "flavour", "stored"),
    [
        ("auto", FN, torch.bfloat16),
        ("float16", FN, torch.float16),
        ("float32", FNUZ, torch.float32),
        ("fp8", FN, FN),
        ("fp8", FNUZ, FNUZ),
        ("fp8_e4m3", FNUZ, FNUZ),
        ("fp8_inc", FN, FN),
        ("fp8_per_token_head", FNUZ, FNUZ),
        ("fp8_e5m2", FNUZ, E5M2),
        ("int8_per_token_head", FN, torch.int8),
    ],
)
def test_a_format_is_stored_in_the_devices_flavour(
    name: str, flavour: torch.dtype, stored: torch.dtype
) -> None:
    assert kv_storage_dtype(name, torch.bfloat16, flavour) is stored


@pytest.mark.parametrize(
    ("name", "dtypes"),
    [
        ("auto", {torch.float16, torch.bfloat16, torch.float32}),
        ("bfloat16", {torch.bfloat16}),
        ("fp8", {FN, FNUZ}),
        ("fp8_e5m2", {E5M2}),
        ("int8_per_token_head", {torch.int8}),
    ],
)
def test_a_format_names_the_dtypes_of_its_tensors(name: str, dtypes: set[torch.dtype]) -> None:
    assert set(kv_storage_dtypes(name)) == dtypes


@pytest.mark.parametrize("name", ["nvfp4", "fp8_ds_mla", "int4_per_token_head", "turboquant_k8v4"])
def test_a_packed_format_has_no_element_dtype(name: str) -> None:
    for ask in (lambda: kv_storage_dtype(name, torch.bfloat16), lambda: kv_storage_dtypes(name)):
        with pytest.raises(InvalidRequestError, match=f"kv_cache_dtype='{name}'.*auto, float16"):
            ask()
