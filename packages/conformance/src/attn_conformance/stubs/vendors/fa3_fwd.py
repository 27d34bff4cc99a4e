"""FlashAttention 3 as fa3-fwd 0.0.3 builds it, by its wheel: no pages, windows or float16."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from attn_conformance.stubs.checks import Limits, refuse_unless
from attn_conformance.stubs.modules import VendorStub
from attn_conformance.stubs.signature import VendorSignature
from attn_conformance.stubs.varlen import Roles, VarlenFunction

__all__ = ["FA3_FWD"]

_BUILD = "This flash attention build does not support"
_LIMITS = Limits(dtypes=(torch.bfloat16, torch.float8_e4m3fn))
_TUNING = frozenset({"deterministic", "num_splits", "pack_gqa", "sm_margin", "scheduler_metadata"})


def _no_windows(arguments: Mapping[str, Any]) -> None:
    is_local = any(side >= 0 for side in arguments["window_size"])
    refuse_unless(not is_local, "fa3_fwd", f"{_BUILD} local attention.")


def _no_pages(arguments: Mapping[str, Any]) -> None:
    refuse_unless(arguments["page_table"] is None, "fa3_fwd", f"{_BUILD} paged KV.")


_VARLEN = VarlenFunction(
    signature=VendorSignature(
        name="flash_attn_varlen_func",
        parameters=(
            "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, "
            "seqused_k=None, softmax_scale=None, causal=False, qv=None, q_descale=None, "
            "k_descale=None, v_descale=None, window_size=(-1, -1), attention_chunk=0, "
            "softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, "
            "return_attn_probs=False"
        ),
        returns="out; with return_attn_probs out and LSE (Hq, T)",
    ),
    roles=Roles(
        key_starts="cu_seqlens_k", max_key_len="max_seqlen_k", lse_flag="return_attn_probs"
    ),
    limits=_LIMITS,
    tuning=_TUNING,
    rules=(_no_windows,),
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
            "return_softmax_lse=False"
        ),
        returns="out; with return_softmax_lse out, LSE and two accumulators",
    ),
    roles=Roles(
        key="k_cache",
        value="v_cache",
        key_lens="cache_seqlens",
        table="page_table",
        lse_flag="return_softmax_lse",
    ),
    limits=_LIMITS,
    tuning=_TUNING,
    with_lse=("output", "lse", "none", "none"),
    rules=(_no_windows, _no_pages),
    needs_positive_scale=True,
)

_LEFT_OUT = ("BACKWARD", "PAGEDKV", "LOCAL", "FP16")
_BUILT = ("SPLIT", "APPENDKV", "SOFTCAP", "PACKGQA", "FP8", "VARLEN", "CLUSTER", "SM8x")
_BUILT_WIDTHS = ("HDIM64", "HDIM96", "HDIM128", "HDIM192", "HDIM256")
_FLAGS = {
    **{f"FLASHATTENTION_DISABLE_{name}": True for name in _LEFT_OUT},
    **{f"FLASHATTENTION_DISABLE_{name}": False for name in (*_BUILT, *_BUILT_WIDTHS)},
    "FLASHATTENTION_ENABLE_VCOLMAJOR": False,
    "FLASH_ATTENTION_DISABLE_HDIMDIFF64": False,
    "FLASH_ATTENTION_DISABLE_HDIMDIFF192": False,
}

FA3_FWD = VendorStub(
    distribution="fa3-fwd",
    version="0.0.3",
    modules={
        "fa3_fwd_interface": {
            "flash_attn_varlen_func": _VARLEN,
            "flash_attn_with_kvcache": _WITH_KVCACHE,
        },
        "fa3_fwd_config": {"CONFIG": {"build_flags": _FLAGS}},
    },
)
"""fa3-fwd 0.0.3: keys that come with the call, in bfloat16; a page table is refused."""
