"""Calls of the library's ops, whose refusals become the project's errors."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from attn_shared.errors import InvalidInputError

__all__ = ["call", "direct", "has_op", "op"]

_REFUSAL = "attn_cpu: "  # how the ops begin to say what is wrong


@cache
def op(name: str) -> Callable[..., Any]:
    """Return an op's one overload, which is called without a look at its arguments' types.

    Args:
        name: of an op of a library that has been loaded.
    """
    overload: Callable[..., Any] = getattr(torch.ops.attn_cpu, name).default
    return overload


def has_op(name: str) -> bool:
    """Return whether the loaded library has an op: one built from an older checkout may not."""
    return hasattr(torch.ops.attn_cpu, name)


def direct(name: str) -> Callable[..., None]:
    """Return what an op's overload calls itself, for calls where a Python function more counts.

    Args:
        name: of an op of a library that has been loaded.
    """
    overload = op(name)
    inner: Callable[..., None] = getattr(overload, "_op", overload)  # no part of torch's promises
    return inner


def call(overload: Callable[..., None], *arguments: object) -> None:
    """Call an op, whose refusals name argument, value and what is allowed.

    Raises:
        InvalidInputError: it refused.
    """
    try:
        overload(*arguments)
    except RuntimeError as error:
        words = str(error).partition("\n")[0]
        if not words.startswith(_REFUSAL):
            raise
        raise InvalidInputError(words.removeprefix(_REFUSAL)) from error
