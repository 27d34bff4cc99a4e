"""Signatures of flash-attn-4 4.0.0b36."""

from __future__ import annotations


def flash_attn_varlen_func(
    q,
    k,
    v,
    qv=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    min_seqlen_k=None,
    seqused_q=None,
    seqused_k=None,
    gather_kv_indices=None,
    page_table=None,
    softmax_scale=None,
    causal=False,
    window_size=(None, None),
    learnable_sink=None,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    score_mod=None,
    score_mod_bwd=None,
    mask_mod=None,
    block_sparse_tensors=None,
    aux_tensors=None,
    aux_scalars=None,
    return_lse=False,
    scheduler_metadata=None,
    seqlen_k_per_split=None,
    disable_scheduler_metadata=False,
    gather_bwd_recompute_p=False,
    gather_bwd_token_chunk=None,
): ...


def flash_attn_combine(
    out_partial,
    lse_partial,
    out=None,
    out_dtype=None,
    cu_seqlens=None,
    seqused=None,
    virtual_batch_idx=None,
    return_lse=True,
): ...


def get_scheduler_metadata(
    max_seqlen_q,
    max_seqlen_k,
    nheads,
    nheads_kv,
    headdim,
    num_splits,
    headdim_v=None,
    pack_gqa=None,
    causal=False,
    window_size_left=None,
    window_size_right=None,
    seqlen_k_new=0,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    cu_seqlens_k_new=None,
    seqused_q=None,
    seqused_k=None,
    leftpad_k=None,
    seqlen_k_per_split=None,
    _arch=None,
): ...
