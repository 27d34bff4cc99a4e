"""Reading frozen dataclasses from JSON, each value checked against the field's annotation."""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from attn_shared.errors import InvalidInputError

__all__ = ["from_record"]

T = TypeVar("T")

_WORDS = {
    int: "an integer",
    float: "a finite number",
    str: "a string",
    bool: "true or false",
    type(None): "null",
}


def from_record(cls: type[T], record: object, where: str) -> T:
    """Return an instance of a dataclass from a JSON object.

    Keys that are no field are left alone: later releases may add some.

    Args:
        cls: the dataclass; its fields are numbers, strings, booleans, enums of strings,
            dataclasses, tuples and mappings of these, or one of these or None.
        record: the object.
        where: its place, for complaints.

    Raises:
        InvalidInputError: a key is missing, or a value is not of its field's type; names the place.
    """
    if not isinstance(record, Mapping):
        raise _bad(where, record, "an object")
    values: dict[str, Any] = {}
    hints = get_type_hints(cls)
    for field in dataclasses.fields(cast("Any", cls)):
        if field.name in record:
            place = f"{where}.{field.name}"
            values[field.name] = _value(hints[field.name], record[field.name], place)
        elif field.default is field.default_factory is dataclasses.MISSING:
            raise InvalidInputError.for_argument(f"{where}.{field.name}", "missing", "a value")
    return cls(**values)


def _value(kind: Any, value: object, where: str) -> Any:
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return _optional(kind, value, where)
    if origin is tuple:
        return _tuple(get_args(kind), value, where)
    if origin is not None:
        return _mapping(get_args(kind)[1], value, where)
    if dataclasses.is_dataclass(kind):
        return from_record(cast("type[Any]", kind), value, where)
    if issubclass(kind, StrEnum):
        return _member(kind, value, where)
    return _scalar(kind, value, where)


def _optional(kind: Any, value: object, where: str) -> Any:
    """Read a value that may be null."""
    if value is None:
        return None
    (own,) = (option for option in get_args(kind) if option is not type(None))
    return _value(own, value, where)


def _tuple(kinds: tuple[Any, ...], value: object, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise _bad(where, value, "a list")
    if kinds[-1] is Ellipsis:
        kinds = (kinds[0],) * len(value)
    if len(kinds) != len(value):
        raise _bad(where, value, f"a list of {len(kinds)}")
    pairs = enumerate(zip(kinds, value, strict=True))
    return tuple(_value(kind, item, f"{where}[{index}]") for index, (kind, item) in pairs)


def _mapping(kind: Any, value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise _bad(where, value, "an object")
    return {str(key): _value(kind, item, f"{where}.{key}") for key, item in value.items()}


def _member(kind: type[StrEnum], value: object, where: str) -> StrEnum:
    names = [str(member) for member in kind]
    if value not in names:
        raise _bad(where, value, ", ".join(names))
    return kind(value)


def _scalar(kind: type, value: object, where: str) -> object:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind is float and is_number and math.isfinite(cast("float", value)):
        return float(cast("float", value))
    if kind is int and is_number and isinstance(value, int):
        return value
    if kind in (str, bool) and isinstance(value, kind):
        return value
    raise _bad(where, value, _WORDS[kind])


def _bad(where: str, value: object, allowed: str) -> InvalidInputError:
    text = repr(value)
    return InvalidInputError.for_argument(
        where, text if len(text) <= 60 else f"{text[:57]}...", allowed
    )
