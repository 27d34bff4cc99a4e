"""The tensors inside a backend's metadata, whatever it is made of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

__all__ = ["tensors_in"]

_DEEPEST = 8


def tensors_in(value: Any, path: str = "metadata", depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Yield (path, tensor) for every tensor that an object holds, in a fixed order.

    Dataclasses, named tuples, sequences, mappings and plain objects are looked into.
    """
    if isinstance(value, Tensor):
        yield path, value
    elif depth < _DEEPEST:
        for name, item in _items(value):
            yield from tensors_in(item, f"{path}{name}", depth + 1)


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, type | str | bytes):
        return
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"[{index}]", item) for index, item in enumerate(value))
    elif is_dataclass(value):
        yield from ((f".{item.name}", getattr(value, item.name)) for item in fields(value))
    elif hasattr(value, "__dict__"):
        yield from ((f".{name}", item) for name, item in sorted(vars(value).items()))
