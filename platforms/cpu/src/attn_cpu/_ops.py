"""Calls of the library's ops, whose refusals become the project's errors."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from attn_shared.errors import InvalidInputError

__all__ = ["OPS", "WRITING_OPS", "call", "direct", "missing_ops", "op"]

WRITING_OPS = (
    *("attention", "attention_cached", "write_and_attend", "write_kv"),
    "merge_attn_states",
)
"""Ops that return nothing and write into their arguments."""

OPS = (
    *WRITING_OPS,
    *("plan", "workspace_bytes"),
    *("cpu_features", "isa_built", "isa_supported", "amx_permission"),
)
"""What this distribution calls: a library of the same sources has all of them."""

_REFUSAL = "attn_cpu: "  # how the ops begin to say what is wrong


@cache
def op(name: str) -> Callable[..., Any]:
    """Return an op's one overload, which is called without a look at its arguments' types.

    Args:
        name: of an op of a library that has been loaded.
    """
    overload: Callable[..., Any] = getattr(torch.ops.attn_cpu, name).default
    return overload


def missing_ops() -> list[str]:
    """Return which ops the loaded library lacks; any means that it was built from other sources."""
    return [name for name in OPS if not hasattr(torch.ops.attn_cpu, name)]


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
