"""Bytes and operations that a workload cannot do without.

Bytes: each visible key and value once per request (once in all for a shared prefix), each query
row, each output row. Operations: two matrix products over the visible pairs, a multiply and an add
each, so 2 * Hq * (D + Dv) per pair; the softmax is not counted (as FlashAttention's authors do,
arXiv 2205.14135).
"""

from __future__ import annotations

from dataclasses import dataclass

from attn_bench.workloads import Workload
from attn_shared.dtypes import kv_storage_dtype

__all__ = ["Work", "count"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one call must move and compute."""

    kv_bytes: int
    io_bytes: int
    operations: int

    @property
    def num_bytes(self) -> int:
        """All bytes that must be moved."""
        return self.kv_bytes + self.io_bytes


def count(workload: Workload) -> Work:
    """Return the bytes and operations of a causal call over this workload."""
    heads = workload.heads
    entry = 2 * heads.head_size * heads.num_kv_heads
    storage = kv_storage_dtype(workload.kv_cache_dtype, workload.dtype)
    shared = workload.shared_prefix_len
    num_keys = shared + sum(length - shared for length in workload.seq_lens)
    pairs = sum(
        visible_pairs(query_len, seq_len)
        for query_len, seq_len in zip(workload.query_lens, workload.seq_lens, strict=True)
    )
    rows = workload.num_tokens * heads.num_heads * heads.head_size
    return Work(
        kv_bytes=num_keys * entry * storage.itemsize,
        io_bytes=2 * rows * workload.dtype.itemsize,
        operations=4 * heads.num_heads * heads.head_size * pairs,
    )


def visible_pairs(query_len: int, seq_len: int) -> int:
    """Return how many (query, key) pairs a causal mask leaves: row r sees seq - query + r + 1."""
    return query_len * (seq_len - query_len) + query_len * (query_len + 1) // 2
