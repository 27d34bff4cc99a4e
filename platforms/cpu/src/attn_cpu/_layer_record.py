"""What the library's short call is told of a layer, once for all of its calls."""

from __future__ import annotations

from numbers import Real

import torch
from torch import Tensor

from attn_shared.kv_cache import AttentionSpec
from attn_shared.spec import LayerSpec

__all__ = ["record_of"]

_COMPUTE = (torch.float32, torch.bfloat16, torch.float16)
_STORED = (*_COMPUTE, torch.float8_e4m3fn, torch.float8_e5m2)  # numbered as the library does


def record_of(spec: LayerSpec, k_scale: float | Tensor, v_scale: float | Tensor) -> Tensor | None:
    """Return the argument `layer` of `attn_cpu::attention_cached`, float64 (10,).

    Args:
        spec: of the layer.
        k_scale: of the layer; held to its cache already, and without effect unless that is fp8.
        v_scale: likewise.

    Returns:
        None where that op does not serve the layer: options of a head's own, keys and values of
        different widths, scales beside each entry, or scales whose numbers may change.
    """
    cache = spec.kv_cache_spec
    if not isinstance(cache, AttentionSpec) or cache.is_packed or cache.has_inline_scales:
        return None
    if spec.has_sinks or spec.has_alibi or cache.dtype not in _STORED:
        return None
    scales: tuple[float | Tensor, float | Tensor] = (1.0, 1.0)
    if cache.is_quantized:
        scales = (k_scale, v_scale)
    if not all(isinstance(scale, Real) for scale in scales):
        return None
    dtypes = (_STORED.index(spec.dtype), _STORED.index(cache.dtype))
    heads = (spec.num_heads, spec.num_kv_heads, spec.head_size)
    numbers = (spec.scale, spec.softcap or 0.0, *scales, *dtypes, cache.block_size, *heads)
    return torch.tensor(numbers, dtype=torch.float64)
