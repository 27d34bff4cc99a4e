"""The note that a `PagedCache` leaves on keys and values for the attention function."""

from __future__ import annotations

import weakref
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attn_shared.errors import UnsupportedOptionError

if TYPE_CHECKING:
    from attn_transformers.paged_cache import PagedCache

__all__ = ["NewTokens", "latest_note", "new_tokens_of"]

_ATTRIBUTE = "attn_new_tokens"


@dataclass(slots=True, eq=False)
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
        """Leave the note on both tensors, and keep in mind where it was left last."""
        for states in (key, value):
            setattr(states, _ATTRIBUTE, self)
        _LATEST.set((weakref.ref(key), weakref.ref(value)))


_LATEST: ContextVar[tuple[weakref.ref[torch.Tensor], weakref.ref[torch.Tensor]] | None] = (
    ContextVar("attn_latest_states", default=None)
)
"""The tensors that a cache was handed last. They die with the pass that made them, also with one
that fails, so that no later pass can take them for its own."""


def latest_note(layer: int | None) -> tuple[NewTokens, torch.Tensor, torch.Tensor] | None:
    """Return the note that was left last, with its tensors, if nobody attended to them yet.

    For models that derive keys and values from what they hand to their cache.

    Args:
        layer: index of the layer that asks; another's note is None.
    """
    latest = _LATEST.get()
    if latest is None:
        return None
    key, value = (reference() for reference in latest)
    note: NewTokens | None = getattr(key, _ATTRIBUTE, None)
    if key is None or value is None or note is None or note.is_written or note.layer != layer:
        return None
    return note, key, value


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
