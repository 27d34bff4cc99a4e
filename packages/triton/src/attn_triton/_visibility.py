"""What a layer lets its queries see, as the kernels' constants."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from attn_shared.request import AttentionType
from attn_shared.spec import LayerSpec

__all__ = ["CACHE_FREE", "Visibility", "visibility_of"]

CACHE_FREE = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)
"""Kinds of attention whose keys and values come with the call."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Visibility:
    """Window and chunk, causality aside; made by `visibility_of`, equal ones once.

    Attributes:
        left: keys that are seen left of the query's own; -1: all.
        right: keys that rows without a causal mask see right of it; -1: all.
        chunk: keys of a chunk of local attention; 0: none.
    """

    left: int = -1
    right: int = -1
    chunk: int = 0


def visibility_of(spec: LayerSpec) -> Visibility:
    """Return what a layer's queries see."""
    left, right = (-1 if side is None else side for side in spec.window)
    return _visibility(left, right, spec.chunk_size or 0)


@functools.cache
def _visibility(left: int, right: int, chunk: int) -> Visibility:
    return Visibility(left=left, right=right, chunk=chunk)
