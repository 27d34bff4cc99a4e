"""FlashAttention 3 for Hopper: tokenspeed-fa3, read from its wheel. Nothing of it was run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from attn_conformance.stubs.checks import Limits, refuse_unless
from attn_conformance.stubs.modules import Namespace, VendorStub
from attn_conformance.stubs.opaque import OpaqueFunction
from attn_conformance.stubs.signature import VendorSignature
from attn_conformance.stubs.varlen import Roles, VarlenFunction

__all__ = ["FLASH_ATTN_3", "FLASH_ATTN_3_LATENT", "FLASH_ATTN_3_PYTHON"]

_TUNING = frozenset({"deterministic", "num_splits", "pack_gqa", "sm_margin", "scheduler_metadata"})


def _no_softcap(arguments: Mapping[str, Any]) -> None:
    """The wheel is built without it."""
    words = "this build of FlashAttention does not support softcap"
    refuse_unless(not arguments["softcap"], "flash_attn_3", words)


def _bounded_queries(arguments: Mapping[str, Any]) -> None:
    is_unbounded = arguments["cu_seqlens_q"] is not None and arguments["max_seqlen_q"] is None
    refuse_unless(not is_unbounded, "flash_attn_3", "cu_seqlens_q needs max_seqlen_q")


def _sinks_of_bfloat16(arguments: Mapping[str, Any]) -> None:
    sinks = arguments["sinks"]
    is_taken = sinks is None or sinks.dtype is torch.bfloat16
    refuse_unless(is_taken, "flash_attn_3", "sinks must have dtype bfloat16")


def _equal_widths(arguments: Mapping[str, Any]) -> None:
    """The wheel is built without the kernels for value heads of another width."""
    suffix = "_cache" if "k_cache" in arguments else ""
    key, value = arguments[f"k{suffix}"], arguments[f"v{suffix}"]
    words = "this build of FlashAttention does not support another V headdim"
    refuse_unless(key.shape[-1] == value.shape[-1], "flash_attn_3", words)


_FP8 = torch.float8_e4m3fn
_LIMITS = Limits(dtypes=(torch.float16, torch.bfloat16, _FP8))

_VARLEN = VarlenFunction(
    signature=VendorSignature(
        name="flash_attn_varlen_func",
        parameters=(
            "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, "
            "seqused_k=None, softmax_scale=None, causal=False, qv=None, q_descale=None, "
            "k_descale=None, v_descale=None, window_size=(-1, -1), attention_chunk=0, "
            "softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, "
            "return_attn_probs=False, sinks=None"
        ),
        returns="out; with return_attn_probs out and LSE (Hq, T)",
    ),
    roles=Roles(
        key_starts="cu_seqlens_k",
        max_key_len="max_seqlen_k",
        sinks="sinks",
        query_descale="q_descale",
        key_descale="k_descale",
        value_descale="v_descale",
        lse_flag="return_attn_probs",
    ),
    limits=_LIMITS,
    tuning=_TUNING,
    rules=(_no_softcap, _sinks_of_bfloat16, _equal_widths),
    needs_positive_scale=True,
)

_WITH_KVCACHE = VarlenFunction(
    signature=VendorSignature(
        name="flash_attn_with_kvcache",
        parameters=(
            "q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, "
            "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, page_table=None, "
            "cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None, "
            "q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, causal=False, "
            "window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True, "
            "scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, "
            "return_softmax_lse=False, sinks=None"
        ),
        returns="out; with return_softmax_lse out, LSE and two accumulators",
    ),
    roles=Roles(
        key="k_cache",
        value="v_cache",
        key_lens="cache_seqlens",
        table="page_table",
        sinks="sinks",
        query_descale="q_descale",
        key_descale="k_descale",
        value_descale="v_descale",
        lse_flag="return_softmax_lse",
    ),
    limits=_LIMITS,
    tuning=_TUNING,
    rules=(_no_softcap, _bounded_queries, _sinks_of_bfloat16, _equal_widths),
    with_lse=("output", "lse", "none", "none"),
    needs_positive_scale=True,
)

_OPERATOR = VarlenFunction(
    signature=VendorSignature(
        name="fwd",
        parameters=(
            "q, k, v, k_new=None, v_new=None, q_v=None, out=None, cu_seqlens_q=None, "
            "cu_seqlens_k=None, cu_seqlens_k_new=None, seqused_q=None, seqused_k=None, "
            "max_seqlen_q=None, max_seqlen_k=None, page_table=None, kv_batch_idx=None, "
            "leftpad_k=None, rotary_cos=None, rotary_sin=None, seqlens_rotary=None, "
            "q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, "
            "is_causal=False, window_size_left=-1, window_size_right=-1, attention_chunk=0, "
            "softcap=0.0, is_rotary_interleaved=False, scheduler_metadata=None, num_splits=0, "
            "pack_gqa=None, sm_margin=0, sinks=None"
        ),
        returns="out, LSE and two accumulators",
    ),
    roles=Roles(
        out="out",
        key_starts="cu_seqlens_k",
        key_lens="seqused_k",
        table="page_table",
        max_key_len="max_seqlen_k",
        causal="is_causal",
        window="",
        window_sides=("window_size_left", "window_size_right"),
        sinks="sinks",
        query_descale="q_descale",
        key_descale="k_descale",
        value_descale="v_descale",
    ),
    limits=_LIMITS,
    tuning=_TUNING,
    plain=("output", "lse", "none", "none"),
    rules=(_no_softcap, _bounded_queries, _sinks_of_bfloat16, _equal_widths),
    needs_positive_scale=True,
)

_SCHEDULER_METADATA = OpaqueFunction(
    signature=VendorSignature(
        name="get_scheduler_metadata",
        parameters=(
            "batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, "
            "cache_seqlens, qkv_dtype='torch.bfloat16', headdim_v=None, cu_seqlens_q=None, "
            "cu_seqlens_k_new=None, cache_leftpad=None, page_size=None, max_seqlen_k_new=0, "
            "causal=False, window_size=(-1, -1), attention_chunk=0, has_softcap=False, "
            "num_splits=0, pack_gqa=None, sm_margin=0"
        ),
        returns="int32, read by the kernel alone",
    ),
    answer=lambda arguments: torch.zeros(arguments["batch_size"] + 1, dtype=torch.int32),
)

_LEFT_OUT = ("BACKWARD", "SOFTCAP", "HDIM96", "SM8x")
_BUILT = ("SPLIT", "PAGEDKV", "APPENDKV", "LOCAL", "PACKGQA", "FP16", "FP8", "VARLEN", "CLUSTER")
_BUILT_WIDTHS = ("HDIM64", "HDIM128", "HDIM192", "HDIM256")
_FLAGS = {
    **{f"FLASHATTENTION_DISABLE_{name}": True for name in _LEFT_OUT},
    **{f"FLASHATTENTION_DISABLE_{name}": False for name in (*_BUILT, *_BUILT_WIDTHS)},
    "FLASHATTENTION_ENABLE_VCOLMAJOR": False,
    "FLASH_ATTENTION_DISABLE_HDIMDIFF64": True,
    "FLASH_ATTENTION_DISABLE_HDIMDIFF192": True,
}

_INTERFACE = {
    "flash_attn_varlen_func": _VARLEN,
    "flash_attn_with_kvcache": _WITH_KVCACHE,
    "get_scheduler_metadata": _SCHEDULER_METADATA,
}
_CONFIG = {"CONFIG": {"build_flags": _FLAGS}}

FLASH_ATTN_3 = VendorStub(
    distribution="tokenspeed-fa3",
    version="3.0.0.post20260810",
    modules={
        "flash_attn_interface": {
            **_INTERFACE,
            "flash_attn_3_gpu": Namespace(functions={"fwd": _OPERATOR}),
        },
        "flash_attn_config": _CONFIG,
    },
)
"""tokenspeed-fa3: paged keys through flash_attn_with_kvcache, pages of any size, sinks, fp8."""

FLASH_ATTN_3_PYTHON = VendorStub(
    distribution="flash-attn-3",
    version="3.0.0",
    modules={"flash_attn_interface": _INTERFACE, "flash_attn_config": _CONFIG},
)
"""The same Python functions where the operator behind them is not to be seen."""

_LATENT = replace(
    _WITH_KVCACHE,
    roles=replace(_WITH_KVCACHE.roles, query_value="qv"),
    limits=replace(_LIMITS, head_size_max=576),
    rules=(_bounded_queries, _sinks_of_bfloat16),
)

FLASH_ATTN_3_LATENT = VendorStub(
    distribution="flash-attn-3",
    version="3.0.0",
    modules={
        "flash_attn_interface": {**_INTERFACE, "flash_attn_with_kvcache": _LATENT},
        "flash_attn_config": {
            "CONFIG": {"build_flags": {**_FLAGS, "FLASH_ATTENTION_DISABLE_HDIMDIFF64": False}}
        },
    },
)
"""A build with kernels for keys of 64 beside values of 512, and so for latents by `qv`."""
