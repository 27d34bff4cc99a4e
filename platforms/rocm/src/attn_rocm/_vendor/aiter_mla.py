"""AITER's decode over latents, whose arguments differ between releases."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from attn_shared.probing import import_library, require

__all__ = ["arguments", "decode"]


def decode() -> Callable[..., Any]:
    """Return mla_decode_fwd.

    Raises:
        ImportError: with the library's own words, or it has none.
    """
    found: Callable[..., Any] = require(
        import_library("aiter.mla"), "mla_decode_fwd", "too old; reinstall amd-aiter"
    )
    return found


def arguments(function: Callable[..., Any]) -> frozenset[str]:
    """Return what a call takes."""
    return frozenset(inspect.signature(function).parameters)
