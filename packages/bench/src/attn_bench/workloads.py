"""What is measured: batches of one step, named, and sets of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import torch

from attn_shared.dtypes import dtype_name
from attn_shared.errors import InvalidRequestError, UnknownNameError
from attn_shared.request import AttentionRequest

__all__ = ["SETS", "Heads", "Workload", "WorkloadPhase", "workload_set"]


class WorkloadPhase(StrEnum):
    """Which part of serving a batch stands for."""

    DECODE = "decode"
    PREFILL = "prefill"
    CHUNKED = "chunked"
    MIXED = "mixed"
    SHARED_PREFIX = "shared_prefix"
    TRACE = "trace"


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """The shape of one layer, per rank."""

    num_heads: int = 32
    num_kv_heads: int = 8
    head_size: int = 128

    def __str__(self) -> str:
        """Read as "32/8x128"."""
        return f"{self.num_heads}/{self.num_kv_heads}x{self.head_size}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One step of one layer.

    Attributes:
        phase: what the batch stands for.
        query_lens: query tokens of each request.
        seq_lens: keys of each request, this step's included.
        heads: the layer's shape.
        dtype: dtype of query, key, value and output.
        kv_cache_dtype: format of the cache.
        block_size: tokens per block; None for the backend's preferred one.
        shared_prefix_len: tokens that all requests share as the same blocks.
        label: a name of its own, where the phase and lengths do not say enough.
    """

    phase: WorkloadPhase
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    heads: Heads = Heads()
    dtype: torch.dtype = torch.bfloat16
    kv_cache_dtype: str = "auto"
    block_size: int | None = 16
    shared_prefix_len: int = 0
    label: str = ""

    def __post_init__(self) -> None:
        """Refuse lengths that describe no batch."""
        if not self.query_lens or len(self.query_lens) != len(self.seq_lens):
            raise InvalidRequestError.for_field(
                "seq_lens", self.seq_lens, f"one length per request ({len(self.query_lens)})"
            )
        for query_len, seq_len in zip(self.query_lens, self.seq_lens, strict=True):
            if not 0 < query_len <= seq_len:
                raise InvalidRequestError.for_field(
                    "query_lens", query_len, f"1 to seq_len={seq_len}"
                )

    @property
    def batch(self) -> int:
        """Requests."""
        return len(self.query_lens)

    @property
    def num_tokens(self) -> int:
        """Query tokens."""
        return sum(self.query_lens)

    @property
    def name(self) -> str:
        """Read as "decode 32x4096 32/8x128 bfloat16"."""
        lengths = self.label or f"{self.batch}x{max(self.seq_lens)}"
        if self.phase is WorkloadPhase.CHUNKED:
            lengths = f"{self.batch}x{max(self.query_lens)}@{max(self.seq_lens)}"
        return f"{self.phase} {lengths} {self.heads} {dtype_name(self.dtype)}"

    def with_fields(self, **changes: Any) -> Workload:
        """Return a copy with some fields changed."""
        return replace(self, **changes)

    def request(self) -> AttentionRequest:
        """Return what the layer asks of a backend."""
        return AttentionRequest(
            num_heads=self.heads.num_heads,
            num_kv_heads=self.heads.num_kv_heads,
            head_size=self.heads.head_size,
            dtype=self.dtype,
            kv_cache_dtype=self.kv_cache_dtype,
            block_size=self.block_size,
        )


def _decode(batch: int, context: int) -> Workload:
    return Workload(
        phase=WorkloadPhase.DECODE, query_lens=(1,) * batch, seq_lens=(context,) * batch
    )


def _prefill(batch: int, length: int) -> Workload:
    return Workload(
        phase=WorkloadPhase.PREFILL, query_lens=(length,) * batch, seq_lens=(length,) * batch
    )


def _chunked(batch: int, query_len: int, context: int) -> Workload:
    return Workload(
        phase=WorkloadPhase.CHUNKED,
        query_lens=(query_len,) * batch,
        seq_lens=(context,) * batch,
    )


def _mixed(num_decodes: int, context: int, *prefills: int) -> Workload:
    """Decodes of growing contexts first, then prefills."""
    contexts = tuple(max(1, context * (i + 1) // num_decodes) for i in range(num_decodes))
    return Workload(
        phase=WorkloadPhase.MIXED,
        query_lens=(1,) * num_decodes + prefills,
        seq_lens=contexts + prefills,
        label=f"{num_decodes}d@{context}+{'+'.join(map(str, prefills))}p",
    )


def _shared(batch: int, prefix: int, own: int) -> Workload:
    return Workload(
        phase=WorkloadPhase.SHARED_PREFIX,
        query_lens=(1,) * batch,
        seq_lens=(prefix + own,) * batch,
        shared_prefix_len=prefix,
        label=f"{batch}x({prefix}+{own})",
    )


SETS: dict[str, tuple[Workload, ...]] = {
    "decode": tuple(_decode(b, c) for b in (1, 8, 32) for c in (1024, 4096)),
    "long-decode": (_decode(1, 16384), _decode(8, 16384), _decode(2, 131072)),
    "prefill": (_prefill(1, 512), _prefill(1, 2048), _prefill(1, 4096)),
    "long-prefill": (_prefill(1, 8192), _prefill(1, 16384)),
    "chunked": (_chunked(1, 512, 4096), _chunked(4, 256, 2048)),
    "mixed": (_mixed(6, 4096, 256, 512), _mixed(24, 2048, 1024)),
    "shared-prefix": (_shared(16, 2048, 256),),
}
"""Named sets; "quick" and "full" are made of them."""

SETS["quick"] = (_decode(1, 1024), _decode(8, 1024), _prefill(1, 512), _mixed(6, 1024, 256))
SETS["full"] = tuple(
    workload
    for name in ("decode", "prefill", "chunked", "mixed", "shared-prefix")
    for workload in SETS[name]
)


def workload_set(names: Iterable[str]) -> tuple[Workload, ...]:
    """Return the workloads of these sets, in order, each once.

    Raises:
        UnknownNameError: a set of that name does not exist.
    """
    found: dict[Workload, None] = {}
    for name in names:
        if name not in SETS:
            raise UnknownNameError.for_name("workload", name, SETS)
        found.update(dict.fromkeys(SETS[name]))
    return tuple(found)
