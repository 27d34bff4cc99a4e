"""Signatures of AITER at commit e4048607a5."""

from __future__ import annotations


def pa_fwd_asm(
    Q,
    K,
    V,
    block_tables,
    context_lens,
    block_tables_stride0,
    max_qlen=1,
    K_QScale=None,
    V_QScale=None,
    out_=None,
    qo_indptr=None,
    high_precision=1,
    kernelName=None,
): ...


def paged_attention_v1(
    out,
    workspace_buffer,
    query,
    key_cache,
    value_cache,
    scale,
    block_tables,
    cu_query_lens,
    context_lens,
    max_context_len,
    alibi_slopes,
    kv_cache_dtype,
    kv_cache_layout,
    logits_soft_cap,
    k_scale,
    v_scale,
    fp8_out_scale=None,
    partition_size=256,
    mtp=1,
    sliding_window=0,
): ...
