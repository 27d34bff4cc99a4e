"""What is measured: batches of one step, named, and sets of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Any

import torch

from attn_shared.dtypes import dtype_name
from attn_shared.errors import InvalidInputError, InvalidRequestError, UnknownNameError

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

    def __post_init__(self) -> None:
        """Refuse shapes that no layer has."""
        is_positive = min(self.num_heads, self.num_kv_heads, self.head_size) > 0
        if not is_positive or self.num_heads % self.num_kv_heads:
            raise InvalidRequestError.for_field(
                "heads", str(self), "query heads that are a multiple of kv heads, and a size >= 1"
            )

    @classmethod
    def parse(cls, text: str) -> Heads:
        """Return the shape written as "32/8x128": query heads, kv heads, head size.

        Raises:
            InvalidInputError: it is written otherwise.
            InvalidRequestError: no layer has such a shape.
        """
        found = re.fullmatch(r"(\d+)/(\d+)x(\d+)", text.strip())
        if found is None:
            raise InvalidInputError.for_argument(
                "heads", repr(text), "query heads / kv heads x head size, as 32/8x128"
            )
        num_heads, num_kv_heads, head_size = map(int, found.groups())
        return cls(num_heads=num_heads, num_kv_heads=num_kv_heads, head_size=head_size)

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
        label: a name of its own, where the lengths do not say enough.
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
        for query_len, seq_len in self.lengths:
            if not 0 < query_len <= seq_len:
                raise InvalidRequestError.for_field(
                    "query_lens", query_len, f"1 to seq_len={seq_len}"
                )
        most = min(seq_len - query_len for query_len, seq_len in self.lengths)
        if not 0 <= self.shared_prefix_len <= most:
            raise InvalidRequestError.for_field(
                "shared_prefix_len",
                self.shared_prefix_len,
                f"0 to {most}, what every request has before this step",
            )
        if self.block_size is not None and self.block_size < 1:
            raise InvalidRequestError.for_field("block_size", self.block_size, "an integer >= 1")

    @property
    def lengths(self) -> tuple[tuple[int, int], ...]:
        """(query_len, seq_len) of each request."""
        return tuple(zip(self.query_lens, self.seq_lens, strict=True))

    @property
    def batch(self) -> int:
        """Requests."""
        return len(self.query_lens)

    @property
    def num_tokens(self) -> int:
        """Query tokens."""
        return sum(self.query_lens)

    @property
    def context(self) -> int:
        """Keys of the longest request."""
        return max(self.seq_lens)

    @property
    def query_len(self) -> int:
        """Query tokens of the request that has most."""
        return max(self.query_lens)

    @property
    def is_uniform(self) -> bool:
        """Whether all requests have the same lengths."""
        return len(set(self.lengths)) == 1

    @property
    def shape(self) -> str:
        """The lengths in a few characters: "32x4096", "4x256@2048", or the workload's own label."""
        if self.label:
            return self.label
        if self.phase is WorkloadPhase.CHUNKED:
            return f"{self.batch}x{self.query_len}@{self.context}"
        return f"{self.batch}x{self.context}"

    @property
    def name(self) -> str:
        """Read as "decode 32x4096 32/8x128 bfloat16"."""
        cache = "" if self.kv_cache_dtype == "auto" else f" {self.kv_cache_dtype} cache"
        return f"{self.phase} {self.shape} {self.heads} {dtype_name(self.dtype)}{cache}"

    def with_fields(self, **changes: Any) -> Workload:
        """Return a copy with some fields changed."""
        return replace(self, **changes)


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


_BASIC_SETS: dict[str, tuple[Workload, ...]] = {
    "decode": tuple(_decode(b, c) for b in (1, 8, 32) for c in (1024, 4096)),
    "long-decode": (_decode(1, 16384), _decode(8, 16384), _decode(2, 131072)),
    "prefill": (_prefill(1, 512), _prefill(1, 2048), _prefill(1, 4096)),
    "long-prefill": (_prefill(1, 8192), _prefill(1, 16384)),
    "chunked": (_chunked(1, 512, 4096), _chunked(4, 256, 2048)),
    "mixed": (_mixed(6, 4096, 256, 512), _mixed(24, 2048, 1024)),
    "shared-prefix": (_shared(16, 2048, 256),),
}
_FULL = ("decode", "prefill", "chunked", "mixed", "shared-prefix")

SETS: Mapping[str, tuple[Workload, ...]] = MappingProxyType(
    {
        **_BASIC_SETS,
        "quick": (_decode(1, 1024), _decode(8, 1024), _prefill(1, 512), _mixed(6, 1024, 256)),
        "full": tuple(workload for name in _FULL for workload in _BASIC_SETS[name]),
    }
)
"""Workloads by the name of their set, for a layer of 32/8x128 in bfloat16."""


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
