"""Bytes and operations that a workload cannot do without.

Bytes: each visible key and value once per request (once in all for a shared prefix), with its
scale where the cache stores one per token and head; each query row; each output row. Operations:
two matrix products over the visible pairs, a multiply and an add each, so 4 * Hq * D per pair; the
softmax is not counted, as is the custom of FlashAttention's authors (arXiv 2205.14135).
"""

from __future__ import annotations

from dataclasses import dataclass

from attn_bench.workloads import Workload
from attn_shared.dtypes import KVQuantMode, kv_quant_mode, kv_storage_dtype

__all__ = ["Work", "count", "visible_pairs"]

_SCALE_BYTES = 4  # a float32 beside each entry
_WITH_SCALES = (KVQuantMode.INT8_PER_TOKEN_HEAD, KVQuantMode.FP8_PER_TOKEN_HEAD)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one call must move and compute.

    Attributes:
        kv_bytes: keys and values, each read once.
        io_bytes: query rows read, output rows written.
        operations: multiplies and adds.
    """

    kv_bytes: int
    io_bytes: int
    operations: int

    @property
    def num_bytes(self) -> int:
        """All bytes that must be moved."""
        return self.kv_bytes + self.io_bytes


def count(workload: Workload) -> Work:
    """Return the bytes and operations of a causal call over this workload.

    Raises:
        InvalidRequestError: the cache's format is packed, so that its bytes are a backend's affair.
    """
    heads = workload.heads
    shared = workload.shared_prefix_len
    num_keys = shared + sum(length - shared for length in workload.seq_lens)
    pairs = sum(visible_pairs(*lengths) for lengths in workload.lengths)
    rows = workload.num_tokens * heads.num_heads * heads.head_size
    return Work(
        kv_bytes=2 * num_keys * heads.num_kv_heads * _entry_bytes(workload),
        io_bytes=2 * rows * workload.dtype.itemsize,
        operations=4 * heads.num_heads * heads.head_size * pairs,
    )


def _entry_bytes(workload: Workload) -> int:
    """Return the bytes of one stored key, or value, of one head."""
    storage = kv_storage_dtype(workload.kv_cache_dtype, workload.dtype)
    scale = _SCALE_BYTES if kv_quant_mode(workload.kv_cache_dtype) in _WITH_SCALES else 0
    return workload.heads.head_size * storage.itemsize + scale


def visible_pairs(query_len: int, seq_len: int) -> int:
    """Return how many (query, key) pairs a causal mask leaves: row r sees seq - query + r + 1."""
    return query_len * (seq_len - query_len) + query_len * (query_len + 1) // 2
