"""Names of compute and KV-cache dtypes, and what each is stored as."""

from __future__ import annotations

from enum import IntEnum, StrEnum
from functools import cache
from types import MappingProxyType

import torch

from attn_shared.errors import InvalidRequestError, UnknownNameError

__all__ = [
    "COMPUTE_DTYPES",
    "KV_CACHE_DTYPES",
    "KVCacheLayout",
    "KVQuantMode",
    "dtype_name",
    "kv_quant_mode",
    "kv_storage_dtype",
    "kv_storage_dtypes",
    "parse_dtype",
    "parse_kv_cache_dtype",
]

COMPUTE_DTYPES = MappingProxyType(
    {
        "float16": torch.float16,
        "bfloat16": torch.bfloat16,
        "float32": torch.float32,
    }
)
"""Dtypes of query, key, value and output, by name."""

_ALIASES = MappingProxyType(
    {
        "half": "float16",
        "fp16": "float16",
        "bf16": "bfloat16",
        "float": "float32",
        "fp32": "float32",
    }
)

KV_CACHE_DTYPES = (
    "auto",
    "float16",
    "bfloat16",
    "float32",
    "fp8",
    "fp8_e4m3",
    "fp8_e5m2",
    "fp8_inc",
    "fp8_ds_mla",
    "int4_per_token_head",
    "int8_per_token_head",
    "fp8_per_token_head",
    "nvfp4",
    "turboquant_k8v4",
    "turboquant_4bit_nc",
    "turboquant_k3v4_nc",
    "turboquant_3bit_nc",
)
"""KV-cache dtype names of the field (vLLM 0.25.1's vocabulary and float32)."""


class KVCacheLayout(StrEnum):
    """Order of tokens (N) and heads (H) inside a cache block in memory."""

    NHD = "NHD"
    HND = "HND"


class KVQuantMode(IntEnum):
    """How the entries of a cache are quantised."""

    NONE = 0
    FP8_PER_TENSOR = 1
    INT8_PER_TOKEN_HEAD = 2
    FP8_PER_TOKEN_HEAD = 3
    INT4_PER_TOKEN_HEAD = 4
    NVFP4 = 5
    FP8_DS_MLA = 6
    TURBOQUANT = 7


_QUANT_MODES = MappingProxyType(
    {
        "fp8": KVQuantMode.FP8_PER_TENSOR,
        "fp8_e4m3": KVQuantMode.FP8_PER_TENSOR,
        "fp8_e5m2": KVQuantMode.FP8_PER_TENSOR,
        "fp8_inc": KVQuantMode.FP8_PER_TENSOR,
        "fp8_ds_mla": KVQuantMode.FP8_DS_MLA,
        "int4_per_token_head": KVQuantMode.INT4_PER_TOKEN_HEAD,
        "int8_per_token_head": KVQuantMode.INT8_PER_TOKEN_HEAD,
        "fp8_per_token_head": KVQuantMode.FP8_PER_TOKEN_HEAD,
        "nvfp4": KVQuantMode.NVFP4,
    }
)

_E4M3 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)

_STORAGE_DTYPES = MappingProxyType(
    {
        "auto": tuple(COMPUTE_DTYPES.values()),
        **{name: (dtype,) for name, dtype in COMPUTE_DTYPES.items()},
        "fp8": _E4M3,
        "fp8_e4m3": _E4M3,
        "fp8_e5m2": (torch.float8_e5m2,),
        "fp8_inc": _E4M3,
        "fp8_per_token_head": _E4M3,
        "int8_per_token_head": (torch.int8,),
    }
)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the short name of a dtype: `torch.bfloat16` gives "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def parse_dtype(name: str | torch.dtype) -> torch.dtype:
    """Return the compute dtype called `name` ("bfloat16", "bf16", torch.bfloat16, ...).

    Raises:
        UnknownNameError: the name is not a compute dtype.
    """
    text = dtype_name(name) if isinstance(name, torch.dtype) else str(name).removeprefix("torch.")
    text = _ALIASES.get(text.lower(), text.lower())
    if text not in COMPUTE_DTYPES:
        raise UnknownNameError.for_name("dtype", text, COMPUTE_DTYPES)
    return COMPUTE_DTYPES[text]


def parse_kv_cache_dtype(name: str) -> str:
    """Return `name` if it is a KV-cache dtype of the field.

    Raises:
        UnknownNameError: it is not.
    """
    if name not in KV_CACHE_DTYPES:
        raise UnknownNameError.for_name("kv_cache_dtype", name, KV_CACHE_DTYPES)
    return name


@cache
def kv_quant_mode(kv_cache_dtype: str) -> KVQuantMode:
    """Return how a cache of this dtype name is quantised."""
    name = parse_kv_cache_dtype(kv_cache_dtype)
    if name.startswith("turboquant_"):
        return KVQuantMode.TURBOQUANT
    return _QUANT_MODES.get(name, KVQuantMode.NONE)


def kv_storage_dtypes(kv_cache_dtype: str) -> tuple[torch.dtype, ...]:
    """Return the dtypes that a cache tensor of this format may have.

    Raises:
        InvalidRequestError: the format is not one element per value (nvfp4, turboquant_*, ...).
    """
    name = parse_kv_cache_dtype(kv_cache_dtype)
    if name not in _STORAGE_DTYPES:
        raise InvalidRequestError.for_field(
            "kv_cache_dtype",
            name,
            f"one of {', '.join(_STORAGE_DTYPES)}, which store one element per value",
            hint="a packed format needs a backend that defines its own cache.",
        )
    return _STORAGE_DTYPES[name]


def kv_storage_dtype(
    kv_cache_dtype: str, dtype: torch.dtype, fp8_e4m3_dtype: torch.dtype = torch.float8_e4m3fn
) -> torch.dtype:
    """Return the dtype of the cache tensor.

    Args:
        kv_cache_dtype: a name of `KV_CACHE_DTYPES`; "auto" stores the compute dtype.
        dtype: the compute dtype.
        fp8_e4m3_dtype: the device's e4m3 flavour, float8_e4m3fn or float8_e4m3fnuz.

    Raises:
        InvalidRequestError: as `kv_storage_dtypes`.
    """
    stored = kv_storage_dtypes(kv_cache_dtype)
    if kv_cache_dtype == "auto":
        return dtype
    return fp8_e4m3_dtype if stored == _E4M3 else stored[0]
