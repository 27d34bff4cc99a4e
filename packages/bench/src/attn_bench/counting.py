"""Bytes and operations that a workload cannot do without.

Bytes: each visible key and value once per request (once in all for a shared prefix), with its
scale where the cache stores one per token and head; each query row; each output row. Operations:
two matrix products over the visible pairs, a multiply and an add each, so 2 * Hq * (D + Dv) per
pair; the softmax is not counted, as is the custom of FlashAttention's authors (arXiv 2205.14135).
Decodes over latents read an entry once: its first part is the value as well. Their operations are
those of the absorbed form, and the projections around it belong to the model.
"""

from __future__ import annotations

from dataclasses import dataclass

from attn_bench.workloads import Workload
from attn_shared.dtypes import KVQuantMode, kv_quant_mode, kv_storage_dtype
from attn_shared.errors import InvalidRequestError

__all__ = ["Work", "count", "visible_keys", "visible_pairs"]

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
        InvalidRequestError: the cache's format is packed, so that its bytes are a backend's affair,
            or a window hides part of a shared prefix.
    """
    heads = workload.heads
    shared = workload.shared_prefix_len
    if shared and workload.window is not None:
        raise InvalidRequestError.for_field("window", workload.window, "None with a shared prefix")
    window = workload.window
    num_keys = shared + sum(visible_keys(*lengths, window) - shared for lengths in workload.lengths)
    pairs = sum(visible_pairs(*lengths, window) for lengths in workload.lengths)
    width = heads.head_size + heads.value_size
    rows = workload.num_tokens * heads.num_heads
    return Work(
        kv_bytes=num_keys * heads.num_kv_heads * _pair_bytes(workload),
        io_bytes=rows * width * workload.dtype.itemsize,
        operations=2 * heads.num_heads * width * pairs,
    )


def _pair_bytes(workload: Workload) -> int:
    """Return the bytes of one stored key with its value, of one head."""
    heads = workload.heads
    storage = kv_storage_dtype(workload.kv_cache_dtype, workload.dtype)
    if heads.is_latent:
        return heads.head_size * storage.itemsize
    scale = _SCALE_BYTES if kv_quant_mode(workload.kv_cache_dtype) in _WITH_SCALES else 0
    return (heads.head_size + heads.value_size) * storage.itemsize + 2 * scale


def visible_keys(query_len: int, seq_len: int, window: int | None = None) -> int:
    """Return how many keys at least one row sees: the first row's window and all that follow."""
    return seq_len if window is None else min(seq_len, query_len - 1 + window)


def visible_pairs(query_len: int, seq_len: int, window: int | None = None) -> int:
    """Return how many (query, key) pairs a causal mask leaves: row r sees seq - query + r + 1.

    Args:
        query_len: rows, at the end of the sequence.
        seq_len: keys.
        window: a row sees at most so many, its own included.
    """
    first = seq_len - query_len + 1
    if window is None or window >= seq_len:
        return query_len * (first + seq_len) // 2
    whole = max(0, seq_len - max(window, first - 1))  # rows that see a full window
    growing = query_len - whole
    return whole * window + growing * (2 * first + growing - 1) // 2
