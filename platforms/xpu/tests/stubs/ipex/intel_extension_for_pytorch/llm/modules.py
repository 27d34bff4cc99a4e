"""Signatures of intel-extension-for-pytorch 2.8.0, as far as they are used here."""

from __future__ import annotations


class PagedAttention:
    @classmethod
    def reshape_and_cache(
        cls,
        key,
        value,
        key_cache,
        value_cache,
        slot_mapping,
        kv_cache_dtype="auto",
        k_scale=1.0,
        v_scale=1.0,
    ): ...

    @classmethod
    def single_query_cached_kv_attention(
        cls,
        output,
        query,
        key_cache,
        value_cache,
        head_mapping,
        scale,
        block_tables,
        context_lens,
        block_size,
        max_context_len,
        alibi_slopes,
        window_size=-1,
        k_scale=1.0,
        v_scale=1.0,
        softcap=-1.0,
    ): ...

    @classmethod
    def flash_attn_varlen_func(
        cls,
        output,
        query,
        key_cache,
        value_cache,
        cu_seqlens_q,
        cu_seqlens_kv,
        max_seqlen_q,
        max_seqlen_kv,
        scale,
        is_cusal,
        block_tables,
        alibi_slopes,
        window_size_left=-1,
        window_size_right=-1,
        kv_cache_dtype="auto",
        k_scale=1.0,
        v_scale=1.0,
        softcap=-1.0,
    ): ...


class VarlenAttention:
    @classmethod
    def apply_function(
        cls,
        query,
        key,
        value,
        out,
        seqlen_q,
        seqlen_k,
        alibi_slopes,
        max_seqlen_q,
        max_seqlen_k,
        pdropout,
        softmax_scale,
        zero_tensors,
        is_causal,
        return_softmax,
        gen_,
        window_size_left,
        window_size_right,
        softcap,
    ): ...
