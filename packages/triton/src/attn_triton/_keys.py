"""Where keys and values are, in numbers: no reference keeps a cache alive that its owner frees."""

from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_shared.kv_cache import AttentionSpec

__all__ = ["CacheReader", "KeysValues", "KeysValuesTensors", "Places", "Strides", "keys_of_call"]

Strides = tuple[int, int, int]
"""From one block to the next, one token, one head, in elements; without a cache 0 first."""


KeysValuesTensors = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""Keys, values, and the scales beside their entries."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Places:
    """How keys and values lie, in what machine code depends on; made by `_places`.

    Equal ones are made once, so that looking up what was compiled for one hashes its identity.

    Attributes:
        strides: of keys and of values.
        page: tokens per block; 0 without a cache.
    """

    strides: tuple[Strides, Strides]
    page: int


@functools.lru_cache(maxsize=1024)
def _places(strides: tuple[Strides, Strides], page: int) -> Places:
    return Places(strides=strides, page=page)


_MOST_CACHES = 64  # that a layer remembers; it has one, and benchmarks a few


@dataclass(frozen=True, slots=True, kw_only=True)
class KeysValues:
    """Keys and values of a call.

    Attributes:
        key, value: addresses.
        key_scales, value_scales: addresses of the scales beside each entry, or None.
        places: how they lie.
        rows: blocks; without a cache tokens.
        dtype: of the elements.
        bits: all that are set in an address, for seeing whether they are aligned.
        device: where they are.
    """

    key: int
    value: int
    key_scales: int | None
    value_scales: int | None
    places: Places
    rows: int
    dtype: torch.dtype
    bits: int
    device: torch.device

    @property
    def strides(self) -> tuple[Strides, Strides]:
        """From one block, token and head to the next, of keys and of values."""
        return self.places.strides

    @property
    def page(self) -> int:
        """Tokens per block; 0 without a cache."""
        return self.places.page

    @property
    def has_inline_scales(self) -> bool:
        """Whether a scale is stored beside each entry."""
        return self.key_scales is not None


class CacheReader:
    """Reads one layer's caches.

    Args:
        spec: of the caches.
    """

    def __init__(self, spec: AttentionSpec) -> None:
        self._spec = spec
        self._seen: dict[int, tuple[weakref.ref[Tensor], KeysValues]] = {}

    def known(self, kv_cache: Tensor | None) -> KeysValues | None:
        """Return where the keys and values of a cache are that was read before; None of another."""
        if kv_cache is None:
            return None
        found = self._seen.get(kv_cache.data_ptr())
        return found[1] if found is not None and found[0]() is kv_cache else None

    def read(self, kv_cache: Tensor) -> KeysValues:
        """Return where the keys and values of a cache are.

        Raises:
            InvalidInputError: it is no cache of the spec.
        """
        keys = self.known(kv_cache)
        if keys is None:
            keys = self._of(kv_cache)
            if len(self._seen) >= _MOST_CACHES:
                self._seen.clear()
            self._seen[kv_cache.data_ptr()] = (weakref.ref(kv_cache), keys)
        return keys

    def tensors(self, kv_cache: Tensor) -> KeysValuesTensors:
        """Return the views of keys, values and their scales."""
        views = self._spec.split(kv_cache)
        return views.key, views.value, views.key_scale, views.value_scale

    def _of(self, kv_cache: Tensor) -> KeysValues:
        key, value, key_scales, value_scales = self.tensors(kv_cache)
        return KeysValues(
            key=key.data_ptr(),
            value=value.data_ptr(),
            key_scales=None if key_scales is None else key_scales.data_ptr(),
            value_scales=None if value_scales is None else value_scales.data_ptr(),
            places=_places((_first_three(key), _first_three(value)), key.shape[1]),
            rows=key.shape[0],
            dtype=key.dtype,
            bits=key.data_ptr() | value.data_ptr(),
            device=key.device,
        )


def keys_of_call(key: Tensor, value: Tensor) -> KeysValues:
    """Return where the (keys, Hkv, D) of a cache-free call are, whose last dimension is dense."""
    return KeysValues(
        key=key.data_ptr(),
        value=value.data_ptr(),
        key_scales=None,
        value_scales=None,
        places=_places(
            ((0, key.stride(0), key.stride(1)), (0, value.stride(0), value.stride(1))), 0
        ),
        rows=key.shape[0],
        dtype=key.dtype,
        bits=key.data_ptr() | value.data_ptr(),
        device=key.device,
    )


def _first_three(view: Tensor) -> Strides:
    block, token, head, _ = view.stride()
    return block, token, head
