"""Arguments of the wrong kind, refused where they enter, in the words of all other refusals."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attn_shared.errors import InvalidInputError

__all__ = [
    "INT64_MOST",
    "count_objection",
    "require_count",
    "require_floats",
    "require_kind",
    "require_list",
    "require_tensor",
]

INT64_MOST = 2**63 - 1
"""The largest number that torch takes."""


def require_kind(name: str, value: object, *kinds: type) -> None:
    """Refuse what is of none of these classes.

    Raises:
        InvalidInputError: names the argument, what it is and what is allowed.
    """
    if not isinstance(value, kinds):
        names = " or ".join(_with_article(kind.__name__) for kind in kinds)
        raise InvalidInputError.for_argument(name, _with_article(type(value).__name__), names)


def count_objection(value: object, least: int = 1) -> str | None:
    """Return what is allowed in place of what is no count (a bool is none); None for one."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        return f"an integer >= {least}"
    return None if value <= INT64_MOST else "an integer of 64 bits"


def require_count(name: str, value: object, least: int = 1) -> None:
    """Refuse what is no int of at least `least`, or more than torch takes.

    Raises:
        InvalidInputError: names the argument, its value and what is allowed.
    """
    allowed = count_objection(value, least)
    if allowed is not None:
        raise InvalidInputError.for_argument(name, repr(value), allowed)


def require_tensor(name: str, value: object) -> None:
    """Refuse what is no tensor.

    Raises:
        InvalidInputError: names the argument and what it is.
    """
    if not isinstance(value, torch.Tensor):
        raise InvalidInputError.for_argument(name, f"a {type(value).__name__}", "a tensor")


def require_floats(name: str, value: object) -> None:
    """Refuse what is no tensor of real floating-point numbers.

    Raises:
        InvalidInputError: names the argument, what it is and what is allowed.
    """
    require_tensor(name, value)
    if isinstance(value, torch.Tensor) and not value.is_floating_point():
        raise InvalidInputError.for_argument(
            f"{name} dtype", value.dtype, "a floating-point dtype", hint="convert it first."
        )


def require_list(name: str, value: object) -> None:
    """Refuse what is no sequence of entries: a number, None, a string, a mapping.

    Raises:
        InvalidInputError: names the argument and what it is.
    """
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise InvalidInputError.for_argument(name, f"a {type(value).__name__}", "a list or a tuple")


def _with_article(name: str) -> str:
    return f"{'an' if name[:1] in 'AEIOaeiou' else 'a'} {name}"
