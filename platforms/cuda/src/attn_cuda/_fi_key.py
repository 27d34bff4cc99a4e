"""What one plan of FlashInfer fixes for all layers that run by it, and what one call brings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from attn_cuda._fi_scales import PLAIN, Scaling
from attn_shared.dtypes import KVCacheLayout
from attn_shared.errors import InvalidInputError
from attn_shared.kv_cache import AttentionSpec
from attn_shared.signed_scale import Scale
from attn_shared.spec import LayerSpec, require_uniform

__all__ = ["Call", "PlanKey", "group_key", "plan_key"]

_PLANNED = (
    *("attn_type", "num_heads", "num_kv_heads", "head_size", "head_size_v", "dtype"),
    *("window", "softcap", "scale", "batch_invariant"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanKey:
    """One window, one softcap and one scale for heads of one form over caches of one form.

    Attributes:
        num_heads, num_kv_heads, head_size: of the layers.
        dtype: of query and output.
        kv_dtype: of the cache's elements.
        layout: of the cache.
        block_size: tokens per page.
        window_left: keys to the left of the query's own; -1 for all.
        softcap: of the logits, or None.
        scale: positive, since kernels take the largest logit before they scale; a layer's sign goes
            to its query.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    layout: KVCacheLayout
    block_size: int
    window_left: int
    softcap: float | None
    scale: float

    @property
    def group(self) -> int:
        """Query heads of one kv head."""
        return self.num_heads // self.num_kv_heads

    @property
    def is_quantized(self) -> bool:
        """Whether the cache is quantised."""
        return self.kv_dtype.itemsize == 1

    def options(self) -> dict[str, Any]:
        """Return the keywords that every `plan` takes alike."""
        return {
            "num_qo_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "sm_scale": self.scale,
            "window_left": self.window_left,
            "logits_soft_cap": self.softcap,
            "q_data_type": self.dtype,
            "kv_data_type": self.kv_dtype,
        }


def group_key(layers: Mapping[str, LayerSpec]) -> PlanKey:
    """Return the key of a group.

    Raises:
        UnsupportedOptionError: layers differ in what one plan must share; has both values.
    """
    return plan_key(require_uniform(layers, _PLANNED))


def plan_key(spec: LayerSpec) -> PlanKey:
    """Return the key of a layer; equal ones are one object.

    Raises:
        InvalidInputError: the layer has no cache of keys and values.
    """
    cache = spec.kv_cache_spec
    if not isinstance(cache, AttentionSpec):
        raise InvalidInputError.for_argument("kv_cache_spec", cache, "an AttentionSpec")
    left = spec.window[0]
    return _interned(
        PlanKey(
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_size=spec.head_size,
            dtype=spec.dtype,
            kv_dtype=cache.dtype,
            layout=cache.layout,
            block_size=cache.block_size,
            window_left=-1 if left is None else left,
            softcap=spec.softcap,
            scale=Scale(spec.scale).value,
        )
    )


@cache
def _interned(key: PlanKey) -> PlanKey:
    return key


@dataclass(slots=True, eq=False)
class Call:
    """One layer's tensors, checked.

    Attributes:
        num_rows: T.
        query: (T, Hq, D), its sign that of the scale.
        cache: keys and values in the cache's own order: (P, S, Hkv, D) or (P, Hkv, S, D).
        output: (T, Hq, D), contiguous.
        lse: (Hq, T) float32, or None.
        fresh: this step's keys and values (T, Hkv, D), where the call brings them.
        scaling: numbers of the cache's scales.
        sinks: (Hq,) float32, or None.
        cache_scales: block scales of a cache of 4 bits, in its order; None for every other.
    """

    num_rows: int
    query: Tensor
    cache: tuple[Tensor, Tensor]
    output: Tensor
    lse: Tensor | None
    fresh: tuple[Tensor, Tensor] | None
    scaling: Scaling = PLAIN
    sinks: Tensor | None = None
    cache_scales: tuple[Tensor, Tensor] | None = None
