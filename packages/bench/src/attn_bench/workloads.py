"""What is measured: batches of one step of one layer."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import torch

from attn_shared.dtypes import dtype_name
from attn_shared.errors import InvalidInputError, InvalidRequestError
from attn_shared.request import MLADims

__all__ = ["Heads", "Workload", "WorkloadPhase"]


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
    """The shape of one layer, per rank.

    Attributes:
        num_heads: query heads.
        num_kv_heads: kv heads; 1 for decodes over latents.
        head_size: width of query and key.
        mla: widths of latent attention. Its decodes have one kv head as wide as an entry of the
            cache, whose latent part is the value; its prefills have ordinary heads, of
            qk_nope_head_dim + qk_rope_head_dim with values of v_head_dim.
    """

    num_heads: int = 32
    num_kv_heads: int = 8
    head_size: int = 128
    mla: MLADims | None = None

    def __post_init__(self) -> None:
        """Refuse shapes that no layer has."""
        is_positive = min(self.num_heads, self.num_kv_heads, self.head_size) > 0
        if not is_positive or self.num_heads % self.num_kv_heads:
            raise InvalidRequestError.for_field(
                "heads", str(self), "query heads that are a multiple of kv heads, and a size >= 1"
            )

    @classmethod
    def latents(cls, num_heads: int, dims: MLADims | None = None) -> Heads:
        """Return the shape of decodes over latents."""
        dims = dims or MLADims()
        return cls(num_heads=num_heads, num_kv_heads=1, head_size=dims.latent_size, mla=dims)

    @classmethod
    def expanded(cls, num_heads: int, dims: MLADims | None = None) -> Heads:
        """Return the shape of prefills whose latents are expanded to all heads."""
        dims = dims or MLADims()
        size = dims.qk_nope_head_dim + dims.qk_rope_head_dim
        return cls(num_heads=num_heads, num_kv_heads=num_heads, head_size=size, mla=dims)

    @classmethod
    def parse(cls, text: str) -> Heads:
        """Return the shape written as "32/8x128": query heads, kv heads, head size.

        Latent attention is written with its value's width: "16/1x576:512" for decodes,
        "16/16x192:128" for prefills, each with a rope part of 64.

        Raises:
            InvalidInputError: it is written otherwise.
            InvalidRequestError: no layer has such a shape.
        """
        found = re.fullmatch(r"(\d+)/(\d+)x(\d+)(?::(\d+))?", text.strip())
        if found is None:
            raise InvalidInputError.for_argument(
                "heads",
                repr(text),
                "query heads / kv heads x head size, as 32/8x128, or with the value's size as "
                "16/1x576:512",
            )
        num_heads, num_kv_heads, head_size = map(int, found.groups()[:3])
        if found[4] is not None:
            return _latent_heads(num_heads, num_kv_heads, head_size, int(found[4]))
        return cls(num_heads=num_heads, num_kv_heads=num_kv_heads, head_size=head_size)

    @property
    def is_latent(self) -> bool:
        """Whether the layer reads a cache of latents."""
        return self.mla is not None and self.head_size == self.mla.latent_size

    @property
    def value_size(self) -> int:
        """Width of a value, and of an output."""
        if self.mla is None:
            return self.head_size
        return self.mla.kv_lora_rank if self.is_latent else self.mla.v_head_dim

    @property
    def softmax_scale(self) -> float:
        """Factor on q.k: of latent attention, that of its expanded heads."""
        if self.mla is None:
            return float(self.head_size**-0.5)
        return float((self.mla.qk_nope_head_dim + self.mla.qk_rope_head_dim) ** -0.5)

    def __str__(self) -> str:
        """Read as "32/8x128", or "16/1x576:512" where values have another width."""
        value = "" if self.value_size == self.head_size else f":{self.value_size}"
        return f"{self.num_heads}/{self.num_kv_heads}x{self.head_size}{value}"


def _latent_heads(num_heads: int, num_kv_heads: int, head_size: int, value_size: int) -> Heads:
    rope = MLADims().qk_rope_head_dim
    if num_kv_heads == 1 and head_size == value_size + rope:
        return Heads.latents(num_heads, MLADims(kv_lora_rank=value_size))
    if num_kv_heads == num_heads and head_size > rope:
        nope = head_size - rope
        return Heads.expanded(num_heads, MLADims(qk_nope_head_dim=nope, v_head_dim=value_size))
    raise InvalidInputError.for_argument(
        "heads",
        f"{num_heads}/{num_kv_heads}x{head_size}:{value_size}",
        f"one kv head of value size + {rope}, or as many kv heads as query heads",
    )


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
        window: keys that a row sees, its own included; None: all up to its own.
        returns_lse: the call also returns the logarithm of each row's denominator.
        own_output: the call returns a tensor of its own instead of writing into one it is given.
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
    window: int | None = None
    returns_lse: bool = False
    own_output: bool = False
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
        if self.window is not None and self.window < 1:
            raise InvalidRequestError.for_field("window", self.window, "an integer >= 1, or None")

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
    def window_sides(self) -> tuple[int | None, int | None]:
        """The window as (left, right) keys beside the query's own."""
        return (None, None) if self.window is None else (self.window - 1, 0)

    @property
    def shape(self) -> str:
        """The lengths in a few characters, and what else is unusual: "32x4096", "4x256@2048"."""
        return " ".join([self.base_shape, *self._extra_words()])

    @property
    def base_shape(self) -> str:
        """The lengths alone, or the workload's own label."""
        if self.label:
            return self.label
        if self.phase is WorkloadPhase.CHUNKED:
            return f"{self.batch}x{self.query_len}@{self.context}"
        return f"{self.batch}x{self.context}"

    def _extra_words(self) -> Iterator[str]:
        if self.window is not None:
            yield f"window {self.window}"
        if self.returns_lse:
            yield "+LSE"
        if self.own_output:
            yield "own out"

    @property
    def name(self) -> str:
        """Read as "decode 32x4096 32/8x128 bfloat16"."""
        cache = "" if self.kv_cache_dtype == "auto" else f" {self.kv_cache_dtype} cache"
        return f"{self.phase} {self.shape} {self.heads} {dtype_name(self.dtype)}{cache}"

    def listed(self) -> dict[str, str | int | None]:
        """What tells it from the others of its set, for JSON."""
        return {
            "phase": str(self.phase),
            "label": self.shape,
            "heads": str(self.heads),
            "dtype": dtype_name(self.dtype),
            "kv_cache_dtype": self.kv_cache_dtype,
            "block_size": self.block_size,
        }

    def with_fields(self, **changes: Any) -> Workload:
        """Return a copy with some fields changed."""
        return replace(self, **changes)
