"""The layers of a `PagedCache`, as transformers sees them."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    get_layer_types_and_kwargs,
)

from attn_shared.errors import InvalidInputError, UnsupportedOptionError

__all__ = ["PagedLayer", "layers_of"]


class PagedLayer(CacheLayerMixin):  # type: ignore[misc]
    """What transformers asks of one layer: how many places it has seen, padding included."""

    is_sliding = False  # it hands no shortened past to anyone: windows are applied by backends
    is_croppable = True
    supports_early_init = False

    def __init__(self, **_options: Any) -> None:
        """Start with nothing seen."""
        super().__init__()
        self.num_places = 0
        self.record_past = False

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: blocks are allocated when the layer attends."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Count the places; returns what it was given."""
        self.num_places += key_states.shape[-2]
        return key_states, value_states

    def get_seq_length(self) -> int:
        """Return the places seen so far."""
        return self.num_places

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return (keys after this pass, index of the first)."""
        return self.num_places + query_length, 0

    def get_max_length(self) -> int:
        """Return -1: there is no greatest length."""
        return -1

    def activate_past_recording(self) -> None:
        """Keep what leaves a window from now on, so that `crop` can bring it back."""
        self.record_past = True


def layers_of(config: Any) -> list[Any]:
    """Return a layer of the right kind for each layer of a model.

    Raises:
        InvalidInputError: it is no configuration of a model.
        UnsupportedOptionError: a kind of layer whose state has no place here.
    """
    if not hasattr(config, "get_text_config"):
        raise InvalidInputError.for_argument(
            "config", f"a {type(config).__name__}", "a model's configuration (`model.config`)"
        )
    kinds, options = get_layer_types_and_kwargs(config.get_text_config(decoder=True))
    layers = []
    for kind, layer_options in zip(kinds, options, strict=True):
        layer_class = DYNAMIC_LAYER_TYPE_MAPPING.get(kind)
        if layer_class in (DynamicLayer, DynamicSlidingWindowLayer):
            layers.append(PagedLayer())
        elif layer_class is None or issubclass(layer_class, DynamicLayer):
            raise UnsupportedOptionError(
                f"PagedCache keeps no state of layers of type {kind!r}.",
                hint="let generate() make transformers' own cache.",
            )
        else:
            layers.append(layer_class(**layer_options))
    return layers
