"""FlashAttention 4: flash-attn-4 4.0.0b36, read from its wheel. Nothing of it was run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attn_conformance.stubs.checks import Limits, refuse_unless
from attn_conformance.stubs.modules import VendorStub
from attn_conformance.stubs.signature import VendorSignature
from attn_conformance.stubs.varlen import Roles, VarlenFunction

__all__ = ["FLASH_ATTN_4"]


def _lengths_with_pages(arguments: Mapping[str, Any]) -> None:
    """With pages the lengths of keys are seqused_k, and nothing else."""
    is_doubled = arguments["page_table"] is not None and arguments["cu_seqlens_k"] is not None
    refuse_unless(not is_doubled, "flash_attn_varlen_func", "page_table excludes cu_seqlens_k")


def _whole_steps_of_pages(arguments: Mapping[str, Any]) -> None:
    """Pages are read without a bound on columns, unless they hold a whole tile of keys."""
    is_paged = arguments["page_table"] is not None
    sizes = (arguments["k"].shape[-1], arguments["v"].shape[-1])
    if is_paged and any(size % 16 for size in sizes):
        raise AssertionError("Paged KV does not support irregular head dim")


_VARLEN = VarlenFunction(
    signature=VendorSignature(
        name="flash_attn_varlen_func",
        parameters=(
            "q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, "
            "max_seqlen_k=None, min_seqlen_k=None, seqused_q=None, seqused_k=None, "
            "gather_kv_indices=None, page_table=None, softmax_scale=None, causal=False, "
            "window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1, "
            "pack_gqa=None, deterministic=False, score_mod=None, score_mod_bwd=None, "
            "mask_mod=None, block_sparse_tensors=None, aux_tensors=None, aux_scalars=None, "
            "return_lse=False, scheduler_metadata=None, seqlen_k_per_split=None, "
            "disable_scheduler_metadata=False, gather_bwd_recompute_p=False, "
            "gather_bwd_token_chunk=None"
        ),
        returns="out and LSE (Hq, T); None for the LSE without return_lse",
    ),
    roles=Roles(
        key_starts="cu_seqlens_k",
        key_lens="seqused_k",
        table="page_table",
        max_key_len="max_seqlen_k",
        sinks="learnable_sink",
        lse_flag="return_lse",
    ),
    limits=Limits(),
    tuning=frozenset(
        {"min_seqlen_k", "num_splits", "pack_gqa", "deterministic", "scheduler_metadata"}
        | {"seqlen_k_per_split", "disable_scheduler_metadata"}
    ),
    plain=("output", "none"),
    rules=(_lengths_with_pages, _whole_steps_of_pages),
    needs_positive_scale=True,
)

FLASH_ATTN_4 = VendorStub(
    distribution="flash-attn-4",
    version="4.0.0b36",
    modules={
        # It looks its version up under another name, and does not find it.
        "flash_attn.cute": {"flash_attn_varlen_func": _VARLEN, "__version__": "0.0.0"},
        "flash_attn.cute.interface": {"flash_attn_varlen_func": _VARLEN},
    },
)
"""flash-attn-4: the fourth position is qv, unbounded is None, out and LSE come as a pair."""
