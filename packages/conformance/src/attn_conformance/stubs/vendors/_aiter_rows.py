"""AITER's calls over rows and over the places of keys, with what they are known to drop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_conformance.stubs.attend import KernelCall, LseForm
from attn_conformance.stubs.checks import Limits, check_indices, refuse_unless
from attn_conformance.stubs.signature import VendorSignature
from attn_conformance.stubs.varlen import Roles, VarlenFunction

__all__ = ["batch_prefill", "varlen"]

_LSE = LseForm(alibi_by_column=True)
_MACHINE_CODE_HEAD = 128
_LARGEST_PAGED_HEAD = 128
_PAGE_SIZES = (1, 16, 1024)
_LOAD_BYTES = 16


@dataclass(frozen=True, kw_only=True)
class _Varlen(VarlenFunction):
    """flash_attn_varlen_func, which may go to machine code that lacks an argument.

    aiter/ops/mha.py takes machine code for bfloat16 heads of 128 without a bias, where no side of
    the window is above 0, and hands it neither the window nor, by release, softcap or sinks.

    Attributes:
        dropped: what machine code is not given -> the value that it then works with.
    """

    dropped: Mapping[str, Any]

    def answer(self, arguments: Mapping[str, Any]) -> Any:
        """Answer as the real function does, drops included."""
        longest = int(arguments["cu_seqlens_q"].diff().max())
        is_single = arguments["max_seqlen_q"] == longest == 1
        if _takes_machine_code(arguments):
            arguments = {**arguments, **self.dropped}
        result = super().answer(arguments)
        if is_single:  # ROCm/aiter#2229: wrong numbers
            for item in result if isinstance(result, tuple) else (result,):
                item.fill_(torch.nan)
        return result


def _takes_machine_code(arguments: Mapping[str, Any]) -> bool:
    query, value = arguments["q"], arguments["v"]
    return (
        query.dtype is torch.bfloat16
        and query.shape[-1] == value.shape[-1] == _MACHINE_CODE_HEAD
        and arguments["alibi_slopes"] is None
        and max(arguments["window_size"][:2]) <= 0
    )


def varlen(window: str, last: str, dropped: Mapping[str, Any]) -> VarlenFunction:
    """Return flash_attn_varlen_func.

    Args:
        window: the default of its window.
        last: parameters after those that all releases have.
        dropped: as in `_Varlen`.
    """
    return _Varlen(
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
        limits=Limits(page_multiple=128),
        lse=_LSE,
        tuning=frozenset({"min_seqlen_q", "deterministic", "how_v3_bf16_cvt"}),
        dropped={"window_size": (-1, -1), **dropped},
        rules=(_one_option_of_logits,),
    )


@dataclass(frozen=True, kw_only=True)
class _BatchPrefill(VarlenFunction):
    """mha_batch_prefill_func: keys by the place of each token, or by a block table."""

    def _kernel_call(self, arguments: Mapping[str, Any]) -> KernelCall:
        name, key, value = self.signature.name, arguments["k"], arguments["v"]
        check_indices(name, "kv_page_indices", arguments["kv_page_indices"], (None,))
        for part, tensor in (("k", key), ("v", value)):
            _check_strides(name, part, tensor)
        if arguments.get("block_table") is None:
            rows = arguments["kv_page_indices"][: int(arguments["kv_indptr"][-1])].long()
            refuse_unless(key.ndim == 3, name, "k must have pages of one token: 3 dimensions")
            refuse_unless(
                not len(rows) or int(rows.max()) < len(key), name, "a place is past the cache"
            )
            arguments = {**arguments, "k": key[rows], "v": value[rows]}
        else:
            words = f"no kernel for pages of {key.shape[1]} tokens"
            refuse_unless(key.ndim == 4 and key.shape[1] in _PAGE_SIZES, name, words)
        return super()._kernel_call(arguments)


def _check_strides(name: str, part: str, tensor: Tensor) -> None:
    """Refuse K or V whose heads, tokens and blocks do not follow each other in this order."""
    *outer, heads, dense = tensor.stride()
    refuse_unless(dense == 1, name, f"{part} must be dense in its last dimension")
    refuse_unless(heads >= tensor.shape[-1], name, f"{part}: head stride {heads}")
    words = f"{part}: token stride {outer[-1]} is below that of its heads together"
    refuse_unless(outer[-1] >= tensor.shape[-2] * heads, name, words)
    for stride in (*outer, heads):
        is_loaded_at_once = stride * tensor.element_size() % _LOAD_BYTES == 0
        refuse_unless(is_loaded_at_once, name, f"{part}: stride {stride} is not of 16 bytes")


def batch_prefill(last: str) -> VarlenFunction:
    """Return mha_batch_prefill_func; `last` are parameters after those of all releases."""
    return _BatchPrefill(
        signature=VendorSignature(
            name="mha_batch_prefill_func",
            parameters=(
                "q, k, v, cu_seqlens_q, kv_indptr, kv_page_indices, max_seqlen_q, max_seqlen_k, "
                "dropout_p=0.0, softmax_scale=None, logits_soft_cap=0.0, causal=False, "
                "window_size=(-1, -1), alibi_slopes=None, deterministic=False, return_lse=False, "
                f"return_attn_probs=False, out=None{last}"
            ),
            returns="out; with return_lse out and LSE (Hq, T)",
        ),
        roles=Roles(
            out="out",
            key_starts="kv_indptr",
            key_lens="seqlen_k" if last else "",
            table="block_table" if last else "",
            max_key_len="max_seqlen_k",
            softcap="logits_soft_cap",
            alibi="alibi_slopes",
            sinks="sink_ptr" if last else "",
            lse_flag="return_lse",
        ),
        limits=Limits(head_size_max=_LARGEST_PAGED_HEAD),
        lse=_LSE,
        tuning=frozenset({"deterministic"}),
        rules=(_one_option_of_logits,),
    )


def _one_option_of_logits(arguments: Mapping[str, Any]) -> None:
    """Kernels are built with a cap or with a bias."""
    is_both = arguments["alibi_slopes"] is not None and arguments["logits_soft_cap"]
    refuse_unless(not is_both, "mha (stub)", "no kernel with ALiBi and a cap")
