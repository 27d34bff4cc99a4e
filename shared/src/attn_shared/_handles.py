"""Layers by number, for the operator in `attn_shared.ops`: a graph holds integers, not layers."""

from __future__ import annotations

import weakref
from typing import Any

from attn_shared.errors import InvalidInputError

__all__ = ["layer_of", "register_layer"]

_LAYERS: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_NEXT_HANDLE = iter(range(1, 2**62))


def register_layer(layer: object) -> int:
    """Keep a layer by a number, for as long as it lives, and return the number."""
    handle = next(_NEXT_HANDLE)
    _LAYERS[handle] = layer
    return handle


def layer_of(handle: int) -> Any:
    """Return the layer of a handle, an `Attention` or an `MLAAttention`.

    Raises:
        InvalidInputError: the layer is gone or never was.
    """
    layer = _LAYERS.get(handle)
    if layer is None:
        raise InvalidInputError.for_argument(
            "handle", handle, f"the handle of a living Attention layer ({sorted(_LAYERS)})"
        )
    return layer
