"""Intel's kernels: vllm-xpu-kernels 0.1.16.2, read from its wheel. Nothing of it was run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from attn_conformance.stubs.checks import Limits, refuse_unless
from attn_conformance.stubs.modules import VendorStub
from attn_conformance.stubs.signature import VendorSignature
from attn_conformance.stubs.varlen import Roles, VarlenFunction

__all__ = ["VLLM_XPU_KERNELS"]

_NAME = "flash_attn_varlen_func"


def _one_kind_of_lengths(arguments: Mapping[str, Any]) -> None:
    starts, lens, table = (
        arguments[name] is not None for name in ("cu_seqlens_k", "seqused_k", "block_table")
    )
    refuse_unless(starts != lens, _NAME, "exactly one of cu_seqlens_k and seqused_k is needed")
    refuse_unless(lens or not table, _NAME, "block_table needs seqused_k")
    refuse_unless(table or starts, _NAME, "cu_seqlens_k is needed without a block_table")


def _not_implemented(arguments: Mapping[str, Any]) -> None:
    if arguments["num_splits"] > 1 or arguments["scheduler_metadata"] is not None:
        raise NotImplementedError("num_splits and scheduler_metadata are not supported")
    if (arguments["k_descale"] is None) != (arguments["v_descale"] is None):
        raise NotImplementedError("k_descale and v_descale are needed together")
    if arguments["fa_version"] != 2:
        raise NotImplementedError("only version 2 is supported")


def _scalar_descales(arguments: Mapping[str, Any]) -> None:
    """Each has to be a view of one number: `scale.expand(B, Hkv)`."""
    for name in ("q_descale", "k_descale", "v_descale"):
        scale = arguments[name]
        if isinstance(scale, Tensor):
            is_one = scale.untyped_storage().nbytes() == scale.dtype.itemsize
            refuse_unless(is_one, _NAME, f"{name} must be a view of one number")


def _window_of_two(arguments: Mapping[str, Any]) -> None:
    window = arguments["window_size"]
    refuse_unless(window is None or len(window) == 2, _NAME, f"window_size is {window}")


VLLM_XPU_KERNELS = VendorStub(
    distribution="vllm-xpu-kernels",
    version="0.1.16.2",
    modules={
        name: {
            _NAME: VarlenFunction(
                signature=VendorSignature(
                    name=_NAME,
                    parameters=(
                        "q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, cu_seqlens_k=None, "
                        "seqused_k=None, q_v=None, dropout_p=0.0, softmax_scale=None, "
                        "causal=False, window_size=None, softcap=0.0, alibi_slopes=None, "
                        "deterministic=False, return_attn_probs=False, block_table=None, "
                        "return_softmax_lse=False, out=None, scheduler_metadata=None, "
                        "q_descale=None, k_descale=None, v_descale=None, num_splits=0, "
                        "fa_version=2, s_aux=None, num_splits_kv=None, is_mix_batch=True, "
                        "host_kv_lens=None"
                    ),
                    returns="out; with return_softmax_lse out and LSE (Hq, T)",
                ),
                roles=Roles(
                    out="out",
                    key_starts="cu_seqlens_k",
                    key_lens="seqused_k",
                    table="block_table",
                    max_key_len="max_seqlen_k",
                    alibi="alibi_slopes",
                    sinks="s_aux",
                    query_descale="q_descale",
                    key_descale="k_descale",
                    value_descale="v_descale",
                    lse_flag="return_softmax_lse",
                ),
                limits=Limits(
                    cache_dtypes=(torch.float8_e4m3fn, torch.float8_e5m2), page_multiple=16
                ),
                tuning=frozenset(
                    {"deterministic", "num_splits", "num_splits_kv", "is_mix_batch"}
                    | {"host_kv_lens", "scheduler_metadata", "fa_version"}
                ),
                rules=(
                    _one_kind_of_lengths,
                    _not_implemented,
                    _scalar_descales,
                    _window_of_two,
                ),
            ),
            "FA2_AVAILABLE": True,
            "FA2_UNAVAILABLE_REASON": None,
        }
        for name in ("vllm_xpu_kernels", "vllm_xpu_kernels.flash_attn_interface")
    },
)
"""vllm-xpu-kernels 0.1.16.2: the bound of queries stands before their starts."""
