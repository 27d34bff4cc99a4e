"""FlashInfer: flashinfer-python 0.7.4, read from its wheel. Nothing of it was run."""

from __future__ import annotations

import torch

from attn_conformance.stubs.attend import LseForm
from attn_conformance.stubs.checks import Limits
from attn_conformance.stubs.modules import VendorStub
from attn_conformance.stubs.planned import PlannedWrapper, PlanRoles
from attn_conformance.stubs.signature import VendorSignature

__all__ = ["FLASHINFER"]

_LSE = LseForm(base="2", layout="TH")
_LIMITS = Limits(
    cache_dtypes=(torch.float8_e4m3fn, torch.float8_e5m2),
    head_size_multiple=64,
    head_size_max=512,
)
_TUNING = frozenset(
    {"float_workspace_buffer", "use_cuda_graph", "backend", "use_tensor_cores", "kv_layout"}
    | {"non_blocking", "use_fp16_qk_reduction", "fixed_split_size", "disable_split_kv"}
    | {"uniform_q_len", "max_token_per_sequence", "max_sequence_kv", "enable_pdl"}
    | {"seq_lens", "seq_lens_q", "block_tables"}
)

_PREFILL = PlannedWrapper(
    name="BatchPrefillWithPagedKVCacheWrapper",
    init=VendorSignature(
        name="BatchPrefillWithPagedKVCacheWrapper",
        parameters=(
            "float_workspace_buffer, kv_layout='NHD', use_cuda_graph=False, qo_indptr_buf=None, "
            "paged_kv_indptr_buf=None, paged_kv_indices_buf=None, "
            "paged_kv_last_page_len_buf=None, custom_mask_buf=None, mask_indptr_buf=None, "
            "backend='auto', jit_args=None, jit_kwargs=None, variant_owns_mask=False, "
            "max_total_num_rows=None"
        ),
        returns="the wrapper",
    ),
    plan=VendorSignature(
        name="BatchPrefillWithPagedKVCacheWrapper.plan",
        parameters=(
            "qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, "
            "num_qo_heads, num_kv_heads, head_dim_qk, page_size, head_dim_vo=None, "
            "custom_mask=None, packed_custom_mask=None, causal=False, pos_encoding_mode='NONE', "
            "use_fp16_qk_reduction=False, sm_scale=None, window_left=-1, logits_soft_cap=None, "
            "rope_scale=None, rope_theta=None, q_data_type='float16', kv_data_type=None, "
            "o_data_type=None, non_blocking=True, prefix_len_ptr=None, "
            "token_pos_in_items_ptr=None, token_pos_in_items_len=0, max_item_len_ptr=None, "
            "seq_lens=None, seq_lens_q=None, block_tables=None, max_token_per_sequence=None, "
            "max_sequence_kv=None, fixed_split_size=None, disable_split_kv=False, "
            "uniform_q_len=None, use_token_head_sf=False"
        ),
        returns="nothing",
    ),
    run=VendorSignature(
        name="BatchPrefillWithPagedKVCacheWrapper.run",
        parameters=(
            "q, paged_kv_cache, *args, q_scale=None, k_scale=None, v_scale=None, out=None, "
            "lse=None, return_lse=False, lse_base='log2', lse_layout='NH', enable_pdl=None, "
            "window_left=None, sinks=None, kv_cache_sf=None, "
            "skip_softmax_threshold_scale_factor=None, use_fp16_softmax=None, "
            "uses_spcompress=None"
        ),
        returns="out; with return_lse out and LSE (T, Hq), in bits unless lse_base says 'ln'",
    ),
    roles=PlanRoles(
        query_starts="qo_indptr",
        page_starts="paged_kv_indptr",
        pages="paged_kv_indices",
        last_page_len="paged_kv_last_page_len",
        head_size_v="head_dim_vo",
    ),
    limits=_LIMITS,
    lse=_LSE,
    tuning=_TUNING,
)

_RAGGED = PlannedWrapper(
    name="BatchPrefillWithRaggedKVCacheWrapper",
    init=VendorSignature(
        name="BatchPrefillWithRaggedKVCacheWrapper",
        parameters=(
            "float_workspace_buffer, kv_layout='NHD', use_cuda_graph=False, qo_indptr_buf=None, "
            "kv_indptr_buf=None, custom_mask_buf=None, mask_indptr_buf=None, backend='auto', "
            "jit_args=None, jit_kwargs=None, variant_owns_mask=False"
        ),
        returns="the wrapper",
    ),
    # Of its parameters past head_dim_vo those are here that a backend of ours passes by keyword.
    plan=VendorSignature(
        name="BatchPrefillWithRaggedKVCacheWrapper.plan",
        parameters=(
            "qo_indptr, kv_indptr, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo=None, *, "
            "causal=False, window_left=-1, logits_soft_cap=None, sm_scale=None, "
            "q_data_type='float16', kv_data_type=None, o_data_type=None"
        ),
        returns="nothing",
    ),
    run=VendorSignature(
        name="BatchPrefillWithRaggedKVCacheWrapper.run",
        parameters=(
            "q, k, v, *args, q_scale=None, k_scale=None, v_scale=None, o_scale=None, out=None, "
            "lse=None, return_lse=False, lse_base='log2', lse_layout='NH', enable_pdl=None, "
            "kv_cache_sf=None"
        ),
        returns="as the paged wrapper's",
    ),
    roles=PlanRoles(query_starts="qo_indptr", page_starts="kv_indptr", head_size_v="head_dim_vo"),
    limits=_LIMITS,
    lse=_LSE,
    tuning=_TUNING,
)

_DECODE = PlannedWrapper(
    name="BatchDecodeWithPagedKVCacheWrapper",
    init=VendorSignature(
        name="BatchDecodeWithPagedKVCacheWrapper",
        parameters=(
            "float_workspace_buffer, kv_layout='NHD', use_cuda_graph=False, "
            "use_tensor_cores=False, paged_kv_indptr_buffer=None, paged_kv_indices_buffer=None, "
            "paged_kv_last_page_len_buffer=None, backend='auto', jit_args=None, jit_kwargs=None"
        ),
        returns="the wrapper",
    ),
    plan=VendorSignature(
        name="BatchDecodeWithPagedKVCacheWrapper.plan",
        parameters=(
            "indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, *, "
            "pos_encoding_mode='NONE', window_left=-1, window_right=0, logits_soft_cap=None, "
            "q_data_type='float16', kv_data_type=None, o_data_type=None, data_type=None, "
            "sm_scale=None, rope_scale=None, rope_theta=None, non_blocking=True, "
            "block_tables=None, seq_lens=None, fixed_split_size=None, disable_split_kv=False, "
            "q_len_per_req=1, is_causal=None, use_token_head_sf=False"
        ),
        returns="nothing",
    ),
    run=VendorSignature(
        name="BatchDecodeWithPagedKVCacheWrapper.run",
        parameters=(
            "q, paged_kv_cache, *args, q_scale=None, k_scale=None, v_scale=None, out=None, "
            "lse=None, return_lse=False, enable_pdl=None, window_left=None, sinks=None, "
            "q_len_per_req=None, skip_softmax_threshold_scale_factor=None, kv_cache_sf=None"
        ),
        returns="out; with return_lse out and LSE (T, Hq) in bits",
    ),
    roles=PlanRoles(
        queries_per_request="q_len_per_req",
        page_starts="indptr",
        pages="indices",
        last_page_len="last_page_len",
        head_size="head_dim",
        causal="is_causal",
    ),
    limits=_LIMITS,
    lse=_LSE,
    tuning=_TUNING,
)

FLASHINFER = VendorStub(
    distribution="flashinfer-python",
    version="0.7.4",
    modules={"flashinfer": {item.name: item for item in (_PREFILL, _RAGGED, _DECODE)}},
)
"""flashinfer-python 0.7.4: its planned wrappers. The LSE is in bits, and (T, Hq)."""
