"""AITER's decode over pages, `paged_attention_v1`: one query row for each request."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_conformance.stubs.attend import KernelCall, NotComputedError
from attn_conformance.stubs.checks import (
    Limits,
    check_indices,
    check_kernel_call,
    check_output,
    refuse_unless,
)
from attn_conformance.stubs.recorder import Recorder
from attn_conformance.stubs.signature import VendorSignature
from attn_shared.quantization import FP8_DTYPES

__all__ = ["PagedDecode"]

_NAME = "paged_attention_v1"
_HEAD_SIZES = (64, 128, 256)
_PARTITION = 256
_MOST_QUERIES_PER_KV = 16

_SIGNATURE = VendorSignature(
    name=_NAME,
    parameters=(
        "out, workspace_buffer, query, key_cache, value_cache, scale, block_tables, "
        "cu_query_lens, context_lens, max_context_len, alibi_slopes, kv_cache_dtype, "
        "kv_cache_layout, logits_soft_cap, k_scale, v_scale, fp8_out_scale=None, "
        "partition_size=256, mtp=1, sliding_window=0"
    ),
    returns="out",
)


@dataclass(frozen=True, kw_only=True)
class PagedDecode:
    """The call of one release.

    Attributes:
        has_keyless: its merge of parts writes rows without keys; else they come out NaN.
    """

    has_keyless: bool
    signature: VendorSignature = _SIGNATURE

    def function(self, recorder: Recorder) -> Callable[..., Any]:
        """Return what stands for the function; its calls go to the recorder."""

        def call(*arguments: Any, **keywords: Any) -> Any:
            return self.answer(recorder.record(self.signature, arguments, keywords))

        call.__name__ = call.__qualname__ = _NAME
        call.__signature__ = self.signature.signature  # type: ignore[attr-defined]
        return call

    def answer(self, arguments: Mapping[str, Any]) -> Tensor:
        """Refuse what the kernel refuses, and compute the rest.

        Raises:
            RuntimeError: as the real function.
            NotComputedError: it would compute this, and the stub does not.
        """
        plain = {"cu_query_lens": None, "fp8_out_scale": None, "mtp": 1, "sliding_window": 0}
        for name, value in {**plain, "partition_size": _PARTITION}.items():
            if arguments[name] != value:
                raise NotComputedError(f"{_NAME}: {name}={arguments[name]!r} is not computed")
        _check_shapes(arguments)
        _check_workspace(arguments)
        call = _kernel_call(arguments)
        check_kernel_call(_NAME, call, Limits(cache_dtypes=tuple(FP8_DTYPES)))
        out: Tensor = arguments["out"]
        check_output(_NAME, "out", out, tuple(call.query.shape), call.query.dtype)
        refuse_unless(out.is_contiguous(), _NAME, "out must be contiguous")
        lens = arguments["context_lens"]
        out.copy_(call.attend().output.to(out.dtype))
        out[lens > arguments["max_context_len"]] = torch.nan
        if not self.has_keyless:
            out[lens < 1] = torch.nan
        return out


def _check_shapes(arguments: Mapping[str, Any]) -> None:
    """Hold what the kernel's templates and its arithmetic of addresses take for granted."""
    query, key, value = (arguments[name] for name in ("query", "key_cache", "value_cache"))
    count, heads, size = query.shape
    refuse_unless(arguments["kv_cache_layout"] == "NHD", _NAME, "kv_cache_layout is not NHD")
    refuse_unless(size in _HEAD_SIZES, _NAME, f"no kernel for head size {size}")
    refuse_unless(_PARTITION % key.shape[1] == 0, _NAME, f"blocks of {key.shape[1]} tokens")
    ratio = heads // key.shape[2]
    refuse_unless(ratio <= _MOST_QUERIES_PER_KV, _NAME, f"{ratio} query heads per kv head")
    refuse_unless(query.stride(1) == size, _NAME, "query heads must follow each other")
    refuse_unless(key.stride() == value.stride(), _NAME, "K and V differ in their strides")
    check_indices(_NAME, "block_tables", arguments["block_tables"], (count, None))
    refuse_unless(arguments["block_tables"].is_contiguous(), _NAME, "block_tables must be dense")
    check_indices(_NAME, "context_lens", arguments["context_lens"], (count,))
    is_fp8 = arguments["kv_cache_dtype"] in ("fp8", "fp8_e4m3")
    refuse_unless(is_fp8 or arguments["kv_cache_dtype"] == "auto", _NAME, "kv_cache_dtype")
    refuse_unless((key.dtype in FP8_DTYPES) == is_fp8, _NAME, "kv_cache_dtype is not the cache's")
    for name in ("k_scale", "v_scale"):
        scale = arguments[name]
        fits = isinstance(scale, Tensor) and scale.dtype is torch.float32 and scale.numel() == 1
        refuse_unless(fits, _NAME, f"{name} must be one float32 on the device")


def _check_workspace(arguments: Mapping[str, Any]) -> None:
    """Refuse a workspace without room for a part's row, its sum and its maximum."""
    query, workspace = arguments["query"], arguments["workspace_buffer"]
    count, heads, size = query.shape
    parts = count * heads * -(-int(arguments["max_context_len"]) // _PARTITION)
    needed = parts * (size * query.element_size() + 8)
    have = workspace.numel() * workspace.element_size()
    refuse_unless(have >= needed, _NAME, f"{have} bytes of workspace, {needed} needed")
    refuse_unless(workspace.is_contiguous(), _NAME, "the workspace must be contiguous")


def _kernel_call(arguments: Mapping[str, Any]) -> KernelCall:
    slopes = arguments["alibi_slopes"]
    refuse_unless(slopes is None or slopes.dtype is torch.float32, _NAME, "slopes are float32")
    is_fp8 = arguments["kv_cache_dtype"] != "auto"
    scales = [float(arguments[name]) if is_fp8 else 1.0 for name in ("k_scale", "v_scale")]
    return KernelCall(
        query=arguments["query"],
        key=arguments["key_cache"],
        value=arguments["value_cache"],
        query_starts=torch.arange(len(arguments["query"]) + 1, dtype=torch.int32),
        key_lens=arguments["context_lens"],
        block_table=arguments["block_tables"],
        scale=float(arguments["scale"]),
        is_causal=True,
        softcap=arguments["logits_soft_cap"] or None,
        alibi_slopes=slopes,
        descales=(1.0, scales[0], scales[1]),
    )
