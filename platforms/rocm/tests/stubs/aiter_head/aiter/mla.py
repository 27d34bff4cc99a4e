"""Signatures of AITER at commit e4048607a5, as far as they are used here."""

from __future__ import annotations


def mla_decode_fwd(
    q,
    kv_buffer,
    o,
    qo_indptr,
    kv_indptr,
    kv_indices,
    kv_last_page_lens,
    max_seqlen_q,
    page_size=1,
    nhead_kv=1,
    sm_scale=None,
    logit_cap=0.0,
    num_kv_splits=None,
    return_lse=False,
    causal=True,
): ...
