"""Where keys and values are, in numbers: no reference keeps a cache alive that its owner frees."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_shared.kv_cache import AttentionSpec

__all__ = ["CacheReader", "KeysValues", "KeysValuesTensors", "Strides", "keys_of_call"]

Strides = tuple[int, int, int]
"""From one block to the next, one token, one head, in elements; without a cache 0 first."""


KeysValuesTensors = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""Keys, values, and the scales beside their entries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeysValues:
    """Keys and values of a call.

    Attributes:
        key, value: addresses.
        key_scales, value_scales: addresses of the scales beside each entry, or None.
        strides: of keys and of values.
        page: tokens per block; 0 without a cache.
        dtype: of the elements.
        bits: all that are set in an address, for seeing whether they are aligned.
        device: where they are.
    """

    key: int
    value: int
    key_scales: int | None
    value_scales: int | None
    strides: tuple[Strides, Strides]
    page: int
    dtype: torch.dtype
    bits: int
    device: torch.device

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
        self._seen: weakref.ref[Tensor] | None = None
        self._address = 0
        self._keys: KeysValues | None = None

    def known(self, kv_cache: Tensor | None) -> KeysValues | None:
        """Return where the keys and values of the cache that was read last are; None of another."""
        if kv_cache is None or self._seen is None or self._seen() is not kv_cache:
            return None
        return self._keys if kv_cache.data_ptr() == self._address else None

    def read(self, kv_cache: Tensor) -> KeysValues:
        """Return where the keys and values of a cache are.

        Raises:
            InvalidInputError: it is no cache of the spec.
        """
        keys = self.known(kv_cache)
        if keys is not None:
            return keys
        self._keys = keys = self._of(kv_cache)
        self._seen, self._address = weakref.ref(kv_cache), kv_cache.data_ptr()
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
            strides=(_first_three(key), _first_three(value)),
            page=key.shape[1],
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
        strides=((0, key.stride(0), key.stride(1)), (0, value.stride(0), value.stride(1))),
        page=0,
        dtype=key.dtype,
        bits=key.data_ptr() | value.data_ptr(),
        device=key.device,
    )


def _first_three(view: Tensor) -> Strides:
    block, token, head, _ = view.stride()
    return block, token, head
