"""The note that a `PagedCache` leaves on keys and values for the attention function."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attn_shared.errors import UnsupportedOptionError

if TYPE_CHECKING:
    from attn_transformers.paged_cache import PagedCache

__all__ = ["NewTokens", "new_tokens_of"]

_ATTRIBUTE = "attn_new_tokens"


@dataclass(slots=True, kw_only=True, eq=False)
class NewTokens:
    """The note on keys and values that a cache was handed in this pass.

    Attributes:
        cache: the cache.
        layer: index of the layer.
        start: places that the layer had seen before.
        count: places handed in.
        is_written: whether they are in their blocks.
    """

    cache: PagedCache
    layer: int
    start: int
    count: int
    is_written: bool = False

    def attach(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Leave the note on both tensors."""
        for states in (key, value):
            setattr(states, _ATTRIBUTE, self)


def new_tokens_of(key: torch.Tensor, value: torch.Tensor) -> NewTokens | None:
    """Return the note that keys and values carry, None if they come from no `PagedCache`.

    Raises:
        UnsupportedOptionError: only one of the two carries it, or each another's.
    """
    notes = [getattr(states, _ATTRIBUTE, None) for states in (key, value)]
    if notes[0] is not notes[1]:
        raise UnsupportedOptionError(
            "the model changed keys or values after it put them into the PagedCache.",
            hint="leave out the PagedCache for this model.",
        )
    return notes[0]
