"""Checks of single fields, shared by the records, and a hash that is computed once."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, TypeVar

from attn_shared.argument_checks import INT64_MOST
from attn_shared.errors import InvalidRequestError, UnknownNameError

__all__ = [
    "FLOAT32_LEAST",
    "FLOAT32_MOST",
    "CachedHash",
    "member_of",
    "require_bool",
    "require_positive",
]

FLOAT32_LEAST, FLOAT32_MOST = 2.0**-126, (2 - 2.0**-23) * 2.0**127
"""The smallest normal and the largest number of float32 (IEEE 754), in which kernels take numbers:
beyond, one would become 0 or infinite there."""

E = TypeVar("E", bound=StrEnum)


class CachedHash:
    """Gives a frozen, slotted dataclass a hash that is computed on first use and kept.

    The class must say `__hash__ = CachedHash.__hash__`, since `dataclass` writes its own
    otherwise. The slot is no field: it is neither compared nor pickled, because strings hash
    differently in the next process.
    """

    __slots__ = ("_hash",)

    _hash: int
    __dataclass_fields__: dict[str, Any]

    def __hash__(self) -> int:
        """Return the hash of the tuple of all fields."""
        try:
            return self._hash
        except AttributeError:
            value = hash(tuple(getattr(self, name) for name in self.__dataclass_fields__))
            object.__setattr__(self, "_hash", value)
            return value


def require_positive(name: str, value: object) -> None:
    """Refuse what is not an int >= 1 that torch takes (a bool is none).

    Raises:
        InvalidRequestError: names the field and the value.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidRequestError.for_field(name, value, "an int >= 1")
    if value > INT64_MOST:
        raise InvalidRequestError.for_field(name, value, "an int of 64 bits")


def require_bool(name: str, value: object) -> None:
    """Refuse what is not a bool: a tensor or a string would be taken for true.

    Raises:
        InvalidRequestError: names the field and the value.
    """
    if not isinstance(value, bool):
        raise InvalidRequestError.for_field(name, value, "True or False")


def member_of(kind: type[E], name: str, value: object) -> E:
    """Return the member of an enum that `value` is or names.

    Raises:
        UnknownNameError: names the field and the value, and lists the members.
    """
    for member in kind:
        if value == member:
            return member
    raise UnknownNameError.for_name(name, value, [str(member) for member in kind])
