"""Views of a cache for each call, as fast as the checks that they need allow."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from torch import Tensor

from attn_shared.errors import InvalidInputError
from attn_shared.kv_cache import AttentionSpec, KVViews

__all__ = ["CacheViews", "splitter"]


class CacheViews:
    """Splits caches, and remembers the views of those that live: layers get the same one each call.

    Views share their cache's storage, so that a remembered address is the same memory still; a
    tensor that was given other memory, or another tensor at the address, is split anew.
    """

    def __init__(self, spec: AttentionSpec) -> None:
        """Start with no cache.

        Args:
            spec: the format of the caches.
        """
        self._split = splitter(spec)
        self._seen: dict[int, tuple[weakref.ref[Tensor], KVViews]] = {}

    def of(self, kv_cache: Tensor) -> KVViews:
        """Return a cache's views.

        Raises:
            InvalidInputError: it is no cache of the spec.
        """
        found = self._seen.get(kv_cache.data_ptr())
        if found is not None and found[0]() is kv_cache:
            return found[1]
        return self._read(kv_cache)

    def _read(self, kv_cache: Tensor) -> KVViews:
        # Views of the cache itself would keep it from ever being freed.
        try:
            views = self._split(kv_cache.detach())
        except RuntimeError as error:  # torch's: its storage was freed or shrunk behind it
            raise InvalidInputError(f"kv_cache has no keys and values: {error}") from error
        seen, address = self._seen, kv_cache.data_ptr()
        if address:  # empty tensors share the null address
            seen[address] = (weakref.ref(kv_cache, lambda _: seen.pop(address, None)), views)
        return views


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
