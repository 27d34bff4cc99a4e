"""FlashAttention 2: flash-attn 2.8.3, read from its repository. Nothing of it was run."""

from __future__ import annotations

import math

from attn_conformance.stubs.attend import LseForm
from attn_conformance.stubs.checks import Limits
from attn_conformance.stubs.modules import VendorStub
from attn_conformance.stubs.signature import VendorSignature
from attn_conformance.stubs.varlen import Roles, VarlenFunction

__all__ = ["FLASH_ATTN_2"]

_TUNING = frozenset({"deterministic", "num_splits"})

# Its kernel calls a row without a key +inf, and adds ALiBi by column in causal rows (alibi.h). With
# pages it leaves early, and forgets that the LSE of ragged queries is (Hq, T) (flash_fwd_kernel.h).
_LSE_2 = LseForm(keyless=math.inf, alibi_by_column=True)
_LSE_RAGGED_2 = LseForm(keyless=math.inf, alibi_by_column=True, keyless_astray=True)

_VARLEN_2 = VarlenFunction(
    signature=VendorSignature(
        name="flash_attn_varlen_func",
        parameters=(
            "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, "
            "softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
            "alibi_slopes=None, deterministic=False, return_attn_probs=False, block_table=None"
        ),
        returns="out; with return_attn_probs out, LSE (Hq, T) and a mask for tests",
    ),
    roles=Roles(
        key_starts="cu_seqlens_k",
        table="block_table",
        max_key_len="max_seqlen_k",
        alibi="alibi_slopes",
        lse_flag="return_attn_probs",
    ),
    limits=Limits(page_multiple=256),
    lse=_LSE_RAGGED_2,
    tuning=_TUNING,
    with_lse=("output", "lse", "none"),
    needs_positive_scale=True,
)

_WITH_KVCACHE_2 = VarlenFunction(
    signature=VendorSignature(
        name="flash_attn_with_kvcache",
        parameters=(
            "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, "
            "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, block_table=None, "
            "softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
            "rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False"
        ),
        returns="out (B, Sq, Hq, D); with return_softmax_lse out and LSE (B, Hq, Sq)",
    ),
    roles=Roles(
        key="k_cache",
        value="v_cache",
        query_starts="",
        key_lens="cache_seqlens",
        table="block_table",
        max_query_len="",
        alibi="alibi_slopes",
        lse_flag="return_softmax_lse",
    ),
    limits=Limits(page_multiple=256),
    lse=_LSE_2,
    tuning=_TUNING,
    needs_positive_scale=True,
)

FLASH_ATTN_2 = VendorStub(
    distribution="flash-attn",
    version="2.8.3",
    modules={
        name: {
            "flash_attn_varlen_func": _VARLEN_2,
            "flash_attn_with_kvcache": _WITH_KVCACHE_2,
        }
        for name in ("flash_attn", "flash_attn.flash_attn_interface")
    },
)
"""flash-attn 2.8.3: pages of 256 tokens, no sinks, no output argument."""
