"""Cases that fit a backend: sizes, dtypes and layouts that its capability takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch

from attn_conformance.case import Case
from attn_shared.capability import Capability, MultipleOf
from attn_shared.dtypes import KVCacheLayout

__all__ = ["Fit"]

_T = TypeVar("_T")

_LEAST_BLOCK = 4  # smaller ones make every sequence long
_HEAD_SIZES = (16, 32, 64, 80, 96, 128, 192, 256, 512)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_KV_CACHE_DTYPES = ("auto", "fp8", "fp8_e5m2", "int8_per_token_head")


class Fit:
    """What a rule's cases have in common, as one capability takes it.

    Each is the smallest or most exact choice, so that a case is quick and an error shows. A
    capability that takes none of the choices gets the first, and then excludes the case itself,
    with its reason.

    Attributes:
        capability: of the backend.
        block_size: tokens per block; lengths that matter are multiples of it and one more or less.
        head_size: D.
        dtype: of the computation.
        kv_cache_dtype: the cache's format.
        layout: of the cache.
    """

    def __init__(self, capability: Capability) -> None:
        """Choose."""
        self.capability = capability
        self.block_size = _block_size(capability)
        self.head_size = _first(_HEAD_SIZES, capability.head_sizes.__contains__)
        self.dtype = _first(_DTYPES, capability.dtypes.__contains__)
        self.kv_cache_dtype = _first(_KV_CACHE_DTYPES, capability.kv_cache_dtypes.__contains__)
        self.layout = next(iter(capability.kv_layouts), KVCacheLayout.NHD)

    def case(
        self, name: str, query_lens: Iterable[int], seq_lens: Iterable[int], **fields: Any
    ) -> Case:
        """Return a case of these choices; `fields` are fields of `Case`, and go first."""
        choices: dict[str, Any] = {
            "block_size": self.block_size,
            "head_size": self.head_size,
            "dtype": self.dtype,
            "kv_cache_dtype": self.kv_cache_dtype,
            "layout": self.layout,
        }
        lens = (tuple(query_lens), tuple(seq_lens))
        return Case(name=name, query_lens=lens[0], seq_lens=lens[1], **{**choices, **fields})


def _block_size(capability: Capability) -> int:
    bases = [size.base if isinstance(size, MultipleOf) else size for size in capability.block_sizes]
    sizes = [-(-_LEAST_BLOCK // base) * base for base in bases]
    accepted = [size for size in sizes if capability.accepts_block_size(size)]
    return min(accepted, default=capability.preferred_block_size)


def _first(choices: tuple[_T, ...], is_taken: Callable[[_T], bool]) -> _T:
    return next((choice for choice in choices if is_taken(choice)), choices[0])
