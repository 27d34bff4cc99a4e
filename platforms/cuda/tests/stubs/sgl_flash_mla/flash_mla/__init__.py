"""Signatures of sgl-flash-mla 1.0.0."""

from __future__ import annotations


def has_legacy():
    return True


def flash_mla_with_kvcache(
    q,
    k_cache,
    block_table,
    cache_seqlens,
    head_dim_v,
    tile_scheduler_metadata,
    num_splits=None,
    softmax_scale=None,
    causal=False,
    is_fp8_kvcache=None,
    indices=None,
    attn_sink=None,
    extra_k_cache=None,
    extra_indices_in_kvcache=None,
    topk_length=None,
    extra_topk_length=None,
    enable_batch_invariant=False,
    use_legacy=False,
    kv_format=None,
    descale_q=None,
    descale_k=None,
): ...


def flash_mla_sparse_fwd(
    q,
    kv,
    indices,
    sm_scale,
    d_v=512,
    attn_sink=None,
    topk_length=None,
    use_legacy=False,
    return_log2_lse=None,
): ...
