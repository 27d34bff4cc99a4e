"""Cases that fit a backend: sizes, dtypes and layouts that its capability takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch

from attn_conformance.case import Case
from attn_shared.capability import Capability
from attn_shared.device import DeviceFacts, preset
from attn_shared.dtypes import KVCacheLayout
from attn_shared.request import MLADims

__all__ = ["Fit"]

_T = TypeVar("_T")

_LEAST_BLOCK, _MOST_BLOCK = 4, 4096  # smaller ones make every sequence long
_HEAD_SIZES = (16, 32, 64, 80, 96, 128, 192, 256, 512)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_LATENTS = (
    MLADims(kv_lora_rank=24, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12),
    MLADims(kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32),
    MLADims(kv_lora_rank=256, qk_nope_head_dim=64, qk_rope_head_dim=64, v_head_dim=64),
    MLADims(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128),
)
_MLA_HEADS = (3, 4, 8, 16, 32, 64, 128)
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

    def __init__(self, capability: Capability, facts: DeviceFacts | None = None) -> None:
        """Choose.

        Args:
            capability: of the backend.
            facts: of the device; None: a CPU.
        """
        self.capability = capability
        self.facts = facts or preset("genericcpu")
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

    def mla_case(
        self, name: str, query_lens: Iterable[int], seq_lens: Iterable[int], **fields: Any
    ) -> Case:
        """Return a case of latent attention; `fields` go first, and `mla` decides the widths."""
        dims = fields.get("mla") or self._latents()
        fields = {"mla": dims, "num_heads": self._mla_heads(dims), **fields}
        widths = {"head_size": dims.latent_size, "head_size_v": dims.kv_lora_rank}
        return self.case(name, query_lens, seq_lens, num_kv_heads=1, **{**widths, **fields})

    def _latents(self) -> MLADims:
        return _first(_LATENTS, lambda dims: dims.latent_size in self.capability.head_sizes)

    def _mla_heads(self, dims: MLADims) -> int:
        """Return the fewest heads that no rule of the capability refuses."""

        def is_taken(num_heads: int) -> bool:
            sizes = {"head_size": dims.latent_size, "head_size_v": dims.kv_lora_rank}
            case = self.case("", (1,), (1,), num_kv_heads=1, num_heads=num_heads, mla=dims, **sizes)
            request = case.request
            rules = (rule.check(request, self.facts) for rule in self.capability.rules)
            return not any(rules)

        return _first(_MLA_HEADS, is_taken)


def _block_size(capability: Capability) -> int:
    sizes = range(_LEAST_BLOCK, _MOST_BLOCK)
    return next(filter(capability.accepts_block_size, sizes), capability.preferred_block_size)


def _first(choices: tuple[_T, ...], is_taken: Callable[[_T], bool]) -> _T:
    return next((choice for choice in choices if is_taken(choice)), choices[0])
