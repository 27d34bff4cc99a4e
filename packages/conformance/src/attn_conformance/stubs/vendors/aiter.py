"""AITER: the wheel amd-aiter 0.1.7 and its repository at e4048607a5. Nothing of it was run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from attn_conformance.stubs.checks import Limits, refuse_unless
from attn_conformance.stubs.modules import VendorStub
from attn_conformance.stubs.signature import VendorSignature
from attn_conformance.stubs.varlen import Roles, VarlenFunction

__all__ = ["AITER_0_1_7", "AITER_HEAD"]

_FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)


def _varlen(window: str, last: str) -> VarlenFunction:
    """Return flash_attn_varlen_func; the repository's has a third window size and a sink."""
    return VarlenFunction(
        signature=VendorSignature(
            name="flash_attn_varlen_func",
            parameters=(
                "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, "
                "min_seqlen_q=0, dropout_p=0.0, softmax_scale=None, logits_soft_cap=0.0, "
                f"causal=False, window_size={window}, bias=None, alibi_slopes=None, "
                "deterministic=False, return_lse=False, return_attn_probs=False, "
                "how_v3_bf16_cvt=1, block_table=None, out=None, cu_seqlens_q_padded=None, "
                f"cu_seqlens_k_padded=None{last}"
            ),
            returns="out; with return_lse out and LSE (Hq, T)",
        ),
        roles=Roles(
            out="out",
            key_starts="cu_seqlens_k",
            table="block_table",
            max_key_len="max_seqlen_k",
            softcap="logits_soft_cap",
            alibi="alibi_slopes",
            sinks="sink_ptr" if last else "",
            lse_flag="return_lse",
        ),
        limits=Limits(),
        tuning=frozenset({"min_seqlen_q", "deterministic", "how_v3_bf16_cvt"}),
    )


def _is_causal(arguments: Mapping[str, Any]) -> None:
    """Its kernel knows nothing else, and asserts it."""
    if not arguments["causal"]:
        raise AssertionError("only causal attention is supported")


def _no_query_descale(arguments: Mapping[str, Any]) -> None:
    if arguments["q_descale"] is not None:
        raise AssertionError("q_descale is not supported")


def _left_window(arguments: Mapping[str, Any]) -> None:
    """The right side is never looked at, so that only what a causal row does not see is right."""
    right = arguments["window_size"][1]
    refuse_unless(right in (0, -1), "unified_attention (stub)", f"the window's right is {right}")


def _unified(middle: str, last: str) -> VarlenFunction:
    """Return unified_attention; the repository's has two more groups of parameters."""
    return VarlenFunction(
        signature=VendorSignature(
            name="unified_attention",
            parameters=(
                "q, k, v, out, cu_seqlens_q, max_seqlen_q, seqused_k, max_seqlen_k, "
                "softmax_scale, causal, window_size, block_table, softcap, q_descale, "
                f"k_descale, v_descale{middle}, alibi_slopes=None, output_scale=None, "
                f"qq_bias=None, sinks=None{last}"
            ),
            returns="nothing",
        ),
        roles=Roles(
            out="out",
            key_lens="seqused_k",
            table="block_table",
            max_key_len="max_seqlen_k",
            alibi="alibi_slopes",
            sinks="sinks",
            query_descale="q_descale",
            key_descale="k_descale",
            value_descale="v_descale",
        ),
        limits=Limits(cache_dtypes=_FP8, head_size_multiple=1, head_size_max=512),
        plain=(),
        rules=(_is_causal, _no_query_descale, _left_window),
    )


def _stub(version: str, varlen: VarlenFunction, triton: Mapping[str, object]) -> VendorStub:
    modules: dict[str, Mapping[str, object]] = {
        name: {"flash_attn_varlen_func": varlen} for name in ("aiter", "aiter.ops.mha")
    }
    for name, function in triton.items():
        modules[name] = {"unified_attention": function}
    return VendorStub(distribution="amd-aiter", version=version, modules=modules)


AITER_0_1_7 = _stub(
    "0.1.7.post2.dev18",
    _varlen("(-1, -1)", ""),
    {"aiter.ops.triton.unified_attention": _unified("", "")},
)
"""amd-aiter 0.1.7.post2.dev18, the wheel."""

_UNIFIED_HEAD = _unified(", q_scales=None", ", shuffled_kv_cache=False, skip_reduce=False")

AITER_HEAD = _stub(
    "0.2.0.dev1",
    _varlen("(-1, -1, 0)", ", sink_ptr=None"),
    {
        "aiter.ops.triton.attention.unified_attention": _UNIFIED_HEAD,
        "aiter.ops.triton.unified_attention": _UNIFIED_HEAD,
    },
)
"""AITER's repository at e4048607a5: sinks, a third window size, another place for Triton's."""
