"""FlashInfer: flashinfer-python 0.6.13 and 0.7.4, read from their wheels.

The first runs on the machine whose figures are in docs/benchmarks; of the second nothing was run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from attn_conformance.stubs.attend import LseForm
from attn_conformance.stubs.cascade import CascadeWrapper
from attn_conformance.stubs.checks import Limits
from attn_conformance.stubs.modules import VendorStub
from attn_conformance.stubs.planned import PlannedWrapper, PlanRoles
from attn_conformance.stubs.signature import VendorSignature
from attn_conformance.stubs.trtllm import TrtllmCall

__all__ = ["FLASHINFER", "FLASHINFER_0_6_13"]

_LSE = LseForm(base="2", layout="TH", keyless=-5e4)  # what its kernels hold for infinity
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

_PREFILL, _RAGGED, _DECODE, _CASCADE = (
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "BatchDecodeWithPagedKVCacheWrapper",
    "MultiLevelCascadeAttentionWrapper",
)
_CONTEXT_CALL = "trtllm_batch_context_with_kv_cache"
_DECODE_CALL = "trtllm_batch_decode_with_kv_cache"


def _rounds(arguments: Mapping[str, Any]) -> bool:
    """Whether the kernels are of its family "fa2", as decode on tensor cores is."""
    if "use_tensor_cores" in arguments:
        return bool(arguments["use_tensor_cores"])
    return bool(arguments["backend"] == "fa2")


def _signature(name: str, *parameters: str, returns: str = "nothing") -> VendorSignature:
    return VendorSignature(
        name=name, parameters=", ".join(filter(None, parameters)), returns=returns
    )


def _prefill(init: str, plan: str, lse: str, run: str) -> PlannedWrapper:
    """Describe the paged prefill of a release by what it has beyond 0.6.13."""
    return PlannedWrapper(
        name=_PREFILL,
        init=_signature(
            _PREFILL,
            "float_workspace_buffer, kv_layout='NHD', use_cuda_graph=False, qo_indptr_buf=None",
            "paged_kv_indptr_buf=None, paged_kv_indices_buf=None, paged_kv_last_page_len_buf=None",
            "custom_mask_buf=None, mask_indptr_buf=None, backend='auto', jit_args=None",
            "jit_kwargs=None",
            init,
            returns="the wrapper",
        ),
        plan=_signature(
            f"{_PREFILL}.plan",
            "qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads",
            "num_kv_heads, head_dim_qk, page_size, head_dim_vo=None, custom_mask=None",
            "packed_custom_mask=None, causal=False, pos_encoding_mode='NONE'",
            "use_fp16_qk_reduction=False, sm_scale=None, window_left=-1, logits_soft_cap=None",
            "rope_scale=None, rope_theta=None, q_data_type='float16', kv_data_type=None",
            "o_data_type=None, non_blocking=True, prefix_len_ptr=None",
            "token_pos_in_items_ptr=None, token_pos_in_items_len=0, max_item_len_ptr=None",
            "seq_lens=None, seq_lens_q=None, block_tables=None, max_token_per_sequence=None",
            "max_sequence_kv=None, fixed_split_size=None, disable_split_kv=False",
            plan,
        ),
        run=_signature(
            f"{_PREFILL}.run",
            "q, paged_kv_cache, *args, q_scale=None, k_scale=None, v_scale=None, out=None",
            "lse=None, return_lse=False",
            lse,
            "enable_pdl=None, window_left=None, sinks=None, kv_cache_sf=None",
            "skip_softmax_threshold_scale_factor=None",
            run,
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
        buffers={
            "qo_indptr": "qo_indptr_buf",
            "paged_kv_indptr": "paged_kv_indptr_buf",
            "paged_kv_indices": "paged_kv_indices_buf",
            "paged_kv_last_page_len": "paged_kv_last_page_len_buf",
        },
        drops=("sinks",),
        rounds_lse=_rounds,
    )


def _ragged(init: str, plan: str, lse: str) -> PlannedWrapper:
    return PlannedWrapper(
        name=_RAGGED,
        init=_signature(
            _RAGGED,
            "float_workspace_buffer, kv_layout='NHD', use_cuda_graph=False, qo_indptr_buf=None",
            "kv_indptr_buf=None, custom_mask_buf=None, mask_indptr_buf=None, backend='auto'",
            "jit_args=None, jit_kwargs=None",
            init,
            returns="the wrapper",
        ),
        plan=_signature(
            f"{_RAGGED}.plan",
            "qo_indptr, kv_indptr, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo=None",
            "custom_mask=None, packed_custom_mask=None, causal=False, pos_encoding_mode='NONE'",
            "use_fp16_qk_reduction=False, window_left=-1, logits_soft_cap=None, sm_scale=None",
            "rope_scale=None, rope_theta=None, q_data_type='float16', kv_data_type=None",
            "o_data_type=None, non_blocking=True, prefix_len_ptr=None",
            "token_pos_in_items_ptr=None, token_pos_in_items_len=0, max_item_len_ptr=None",
            "fixed_split_size=None, disable_split_kv=False, seq_lens=None, seq_lens_q=None",
            "max_token_per_sequence=None, max_sequence_kv=None, v_indptr=None, o_indptr=None",
            plan,
        ),
        run=_signature(
            f"{_RAGGED}.run",
            "q, k, v, *args, q_scale=None, k_scale=None, v_scale=None, o_scale=None, out=None",
            "lse=None, return_lse=False",
            lse,
            "enable_pdl=None, kv_cache_sf=None",
            returns="as the paged wrapper's",
        ),
        roles=PlanRoles(
            query_starts="qo_indptr", page_starts="kv_indptr", head_size_v="head_dim_vo"
        ),
        limits=_LIMITS,
        lse=_LSE,
        tuning=_TUNING,
        rounds_lse=_rounds,
    )


def _decode(init: str, plan: str) -> PlannedWrapper:
    return PlannedWrapper(
        name=_DECODE,
        init=_signature(
            _DECODE,
            "float_workspace_buffer, kv_layout='NHD', use_cuda_graph=False",
            "use_tensor_cores=False, paged_kv_indptr_buffer=None, paged_kv_indices_buffer=None",
            "paged_kv_last_page_len_buffer=None, backend='auto', jit_args=None",
            init,
            returns="the wrapper",
        ),
        plan=_signature(
            f"{_DECODE}.plan",
            "indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size",
            plan,
        ),
        run=_signature(
            f"{_DECODE}.run",
            "q, paged_kv_cache, *args, q_scale=None, k_scale=None, v_scale=None, out=None",
            "lse=None, return_lse=False, enable_pdl=None, window_left=None, sinks=None",
            "q_len_per_req=None, skip_softmax_threshold_scale_factor=None, kv_cache_sf=None",
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
        buffers={
            "indptr": "paged_kv_indptr_buffer",
            "indices": "paged_kv_indices_buffer",
            "last_page_len": "paged_kv_last_page_len_buffer",
        },
        drops=("sinks",),
        rounds_lse=_rounds,
    )


def _cascade(level: PlannedWrapper) -> CascadeWrapper:
    return CascadeWrapper(
        name=_CASCADE,
        init=_signature(
            _CASCADE,
            "num_levels, float_workspace_buffer, kv_layout='NHD', use_cuda_graph=False",
            "qo_indptr_buf_arr=None, paged_kv_indptr_buf_arr=None, paged_kv_indices_buf_arr=None",
            "paged_kv_last_page_len_buf_arr=None",
            returns="the wrapper",
        ),
        plan=_signature(
            f"{_CASCADE}.plan",
            "qo_indptr_arr, paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len",
            "num_qo_heads, num_kv_heads, head_dim, page_size, causal=False",
            "pos_encoding_mode='NONE', use_fp16_qk_reduction=False, sm_scale=None",
            "window_left=-1, logits_soft_cap=None, rope_scale=None, rope_theta=None",
            "q_data_type='float16', kv_data_type=None",
        ),
        run=_signature(f"{_CASCADE}.run", "q, paged_kv_cache", returns="out alone"),
        level=level,
    )


def _context_call(more: str) -> TrtllmCall:
    return TrtllmCall(
        signature=_signature(
            _CONTEXT_CALL,
            "query, kv_cache, workspace_buffer, block_tables, seq_lens, max_q_len, max_kv_len",
            "bmm1_scale, bmm2_scale, batch_size, cum_seq_lens_q, cum_seq_lens_kv, window_left=-1",
            "out=None, out_dtype=None, o_sf_scale=None, o_sf_vec_size=None, kv_layout='HND'",
            "enable_pdl=None, sinks=None, kv_cache_sf=None",
            "skip_softmax_threshold_scale_factor=None, uses_shared_paged_kv_idx=True",
            "causal=True, lse=None, return_lse=False",
            more,
            returns="out; with return_lse out and LSE (T, Hq) in bits",
        ),
        lse=_LSE,
    )


def _decode_call(more: str) -> TrtllmCall:
    return TrtllmCall(
        signature=_signature(
            _DECODE_CALL,
            "query, kv_cache, workspace_buffer, block_tables, seq_lens, max_seq_len",
            "bmm1_scale=1.0, bmm2_scale=1.0, window_left=-1, out=None, out_dtype=None",
            "o_sf_scale=None, o_sf_vec_size=None, sinks=None, kv_layout='HND', enable_pdl=None",
            "backend='auto', q_len_per_req=1, o_scale=1.0, mask=None, max_q_len=None",
            "cum_seq_lens_q=None, skip_softmax_threshold_scale_factor=None, kv_cache_sf=None",
            "uses_shared_paged_kv_idx=True, lse=None, return_lse=False",
            more,
            returns="out; with return_lse, of trtllm-gen alone, out and LSE (T, Hq) in bits",
        ),
        lse=_LSE,
    )


def _stub(
    version: str,
    prefill: PlannedWrapper,
    ragged: PlannedWrapper,
    decode: PlannedWrapper,
    *calls: TrtllmCall,
) -> VendorStub:
    planned = (prefill, ragged, decode, _cascade(prefill))
    return VendorStub(
        distribution="flashinfer-python",
        version=version,
        modules={
            "flashinfer": {item.name: item for item in planned},
            "flashinfer.prefill": {_CONTEXT_CALL: calls[0]},
            "flashinfer.decode": {_DECODE_CALL: calls[1]},
        },
    )


_LSE_FORM = "lse_base='log2', lse_layout='NH'"

FLASHINFER = _stub(
    "0.7.4",
    _prefill(
        "variant_owns_mask=False, max_total_num_rows=None",
        "uniform_q_len=None, use_token_head_sf=False",
        _LSE_FORM,
        "use_fp16_softmax=None, uses_spcompress=None",
    ),
    _ragged(
        "variant_owns_mask=False",
        "qo_indptr_cpu=None, kv_indptr_cpu=None, uniform_q_len=None, use_token_head_sf=False",
        _LSE_FORM,
    ),
    _decode(
        "jit_kwargs=None",
        # The wheel's own says **kwargs; these are the names that it looks for among them.
        "*, pos_encoding_mode='NONE', window_left=-1, window_right=0, logits_soft_cap=None, "
        "q_data_type='float16', kv_data_type=None, o_data_type=None, data_type=None, "
        "sm_scale=None, rope_scale=None, rope_theta=None, non_blocking=True, "
        "block_tables=None, seq_lens=None, fixed_split_size=None, disable_split_kv=False, "
        "q_len_per_req=1, is_causal=None, use_token_head_sf=False",
    ),
    _context_call(
        "multi_ctas_kv_counter_buffer=None, use_fp16_softmax=None, uses_spcompress=None, "
        "backend='trtllm-gen', window_right=-1, variable_window_token_starts=None, "
        "variable_window_token_ends=None"
    ),
    _decode_call(
        "bmm1_scale_log2=None, multi_ctas_kv_counter_buffer=None, "
        "enable_block_sparse_attention=False, cp_world=1, cp_rank=0, "
        "causal_seqlens_kv_global=None, bf16q_fp8kv_transform_mode=None, request_order=None, "
        "request_order_plan=None, sparse_top_k=0, length_aware_schedule=False"
    ),
)
"""flashinfer-python 0.7.4. The LSE is in bits, and (T, Hq)."""

FLASHINFER_0_6_13 = _stub(
    "0.6.13",
    _prefill("", "", "", ""),
    _ragged("", "", ""),
    _decode(
        "",
        "pos_encoding_mode='NONE', window_left=-1, logits_soft_cap=None, q_data_type='float16', "
        "kv_data_type=None, o_data_type=None, data_type=None, sm_scale=None, rope_scale=None, "
        "rope_theta=None, non_blocking=True, block_tables=None, seq_lens=None, "
        "fixed_split_size=None, disable_split_kv=False, q_len_per_req=1",
    ),
    _context_call(""),
    _decode_call(""),
)
"""flashinfer-python 0.6.13, in which nothing chooses the base of the LSE."""
