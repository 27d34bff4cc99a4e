"""Calls of the library's ops, whose refusals become the project's errors."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

from attn_shared.errors import InvalidInputError

__all__ = ["call", "op"]

_REFUSAL = "attn_cpu: "  # how the ops begin to say what is wrong


@cache
def op(name: str) -> Callable[..., None]:
    """Return an op's one overload, which is called without a look at its arguments' types.

    Args:
        name: of an op of a library that has been loaded.
    """
    overload: Callable[..., None] = getattr(torch.ops.attn_cpu, name).default
    return overload


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
