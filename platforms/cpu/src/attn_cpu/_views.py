"""Views of a cache for each call, as fast as the checks that they need allow."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from attn_shared.kv_cache import AttentionSpec, KVViews

__all__ = ["splitter"]


def splitter(spec: AttentionSpec) -> Callable[[Tensor], KVViews]:
    """Return what `spec.split` does, at a fraction of its time where keys and values lie apart.

    A tensor that is not obviously a cache of the spec is left to `spec.split`, which says why.

    Args:
        spec: the cache's format.
    """
    if spec.is_packed or spec.has_inline_scales:
        return spec.split
    dtype, tail = spec.dtype, spec.shape(1)[1:]

    def split(kv_cache: Tensor) -> KVViews:
        if kv_cache.dtype is not dtype or kv_cache.shape[1:] != tail or kv_cache.stride(4) != 1:
            return spec.split(kv_cache)
        key, value = kv_cache.unbind(1)
        return KVViews(key, value)

    return split
