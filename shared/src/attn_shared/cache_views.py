"""Views of a layer's cache, made once."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor

__all__ = ["Views"]


class Views:
    """Keys and values in the cache of the last call, which was found right.

    A step has one cache for each layer and keeps it, so that to check and split it again would cost
    the host more than all else of a call. The views go when the cache goes.
    """

    def __init__(self) -> None:
        self._cache: weakref.ref[Tensor] | None = None
        self._parts: tuple[Tensor, Tensor] | None = None

    def cache(self) -> Tensor | None:
        """Return the cache whose views are kept, if it is still there."""
        return None if self._cache is None else self._cache()

    @property
    def parts(self) -> tuple[Tensor, Tensor]:
        """Keys and values (blocks, block_size, Hkv, width) of `cache`.

        Raises:
            LookupError: none are kept.
        """
        if self._parts is None:
            raise LookupError("no views are kept")
        return self._parts

    def keep(self, cache: Tensor, parts: tuple[Tensor, Tensor]) -> None:
        """Keep the views of a cache as long as that lives."""
        key, value = parts
        self._parts = (key.data, value.data)  # a view refers to its base, and would keep it alive
        self._cache = weakref.ref(cache, self._forget)

    def _forget(self, gone: weakref.ref[Any]) -> None:
        if gone is self._cache:
            self._cache = self._parts = None
