"""Reading a model's config.json: each value is checked where it is taken, and named if odd."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attn_shared._fields import FLOAT32_LEAST, FLOAT32_MOST
from attn_shared.errors import InvalidInputError

__all__ = ["ConfigValues", "read_json"]


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a config.json, or in the one inside a folder of a model.

    Raises:
        InvalidInputError: it cannot be read, or holds no JSON object.
    """
    file = path
    try:
        file = path / "config.json" if path.is_dir() else path  # refuses a name that is too long
        record = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        words = getattr(error, "strerror", None) or str(error)
        raise InvalidInputError.for_argument(
            "model",
            f"{str(path)!r} ({words})",
            "a config.json, or the folder that holds one",
            hint="download the config.json of a model; nothing is fetched from a hub.",
        ) from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits is no JSONError
        raise InvalidInputError.for_argument(
            "model", f"{str(file)!r} (no JSON: {error})", "a config.json"
        ) from error
    if not isinstance(record, dict):
        raise InvalidInputError.for_argument(
            "model", f"{str(file)!r} (a JSON {type(record).__name__})", "a JSON object"
        )
    return record


class ConfigValues:
    """The values of one config.json.

    A null counts as missing, as it does where models are built from it.

    Args:
        record: the object of the file.
        where: what an error calls it.
    """

    def __init__(self, record: Mapping[str, Any], where: str) -> None:
        self.record = record
        self.where = where

    def count(self, *names: str, default: int | None = None) -> int:
        """Return the whole number >= 1 under the first of the names that is there.

        Raises:
            InvalidInputError: none is there and there is no default, or it is no such number.
        """
        found = self.optional_count(*names)
        if found is not None:
            return found
        if default is not None:
            return default
        raise self.missing(names, "an integer >= 1")

    def optional_count(self, *names: str, least: int = 1) -> int | None:
        """Return the whole number >= `least` under the first of the names that is there, or None.

        Raises:
            InvalidInputError: it is no such number.
        """
        name, value = self._first(names)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.odd(name, value, f"an integer >= {least}")
        return value

    def flag(self, name: str, *, default: bool = False) -> bool:
        """Return a truth value.

        Raises:
            InvalidInputError: it is none.
        """
        value = self.record.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.odd(name, value, "true or false")
        return value

    def cap(self, name: str, default: float | None = None) -> float | None:
        """Return a cap on logits, a finite number > 0; null is no cap.

        Raises:
            InvalidInputError: it is no such number.
        """
        if name not in self.record:
            return default
        value = self.record[name]
        if value is None:
            return None
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not FLOAT32_LEAST <= value <= FLOAT32_MOST:
            raise self.odd(name, value, "a finite number > 0, or null")
        return float(value)

    def word(self, name: str, default: str | None = None) -> str:
        """Return a text.

        Raises:
            InvalidInputError: it is missing without a default, or no text.
        """
        value = self.record.get(name)
        if value is None and default is not None:
            return default
        if value is None:
            raise self.missing((name,), "a text")
        if not isinstance(value, str):
            raise self.odd(name, value, "a text")
        return value

    def indices(self, name: str, below: int) -> frozenset[int] | None:
        """Return a list of layer numbers as a set, or None where it is missing.

        Raises:
            InvalidInputError: it is no list of whole numbers from 0 to `below` - 1.
        """
        value = self.record.get(name)
        if value is None:
            return None
        if not _is_list_of(value, int) or not all(0 <= index < below for index in value):
            raise self.odd(name, value, f"a list of layer numbers from 0 to {below - 1}")
        return frozenset(value)

    def names(self, name: str, length: int) -> list[str] | None:
        """Return a list of one name a layer, or None where it is missing.

        Raises:
            InvalidInputError: it is no list of so many texts.
        """
        value = self.record.get(name)
        if value is None:
            return None
        if not _is_list_of(value, str):
            raise self.odd(name, value, "a list of texts")
        if len(value) != length:
            raise self._error(
                name, f"of length {len(value)}", f"one entry for each of {length} layers"
            )
        return list(value)

    def overrides(self, name: str, below: int) -> dict[int, ConfigValues]:
        """Return these values as single layers have them, by the layers' numbers.

        Raises:
            InvalidInputError: it is no object of objects by layer numbers.
        """
        found: dict[int, ConfigValues] = {}
        allowed = f"an object of objects, by layer numbers from 0 to {below - 1}"
        listed = self.record.get(name) or {}
        if not isinstance(listed, Mapping):
            raise self.odd(name, listed, allowed)
        for key, own in ((str(key), own) for key, own in listed.items()):
            is_number = key.isascii() and key.isdecimal() and int(key) < below
            if not is_number or not isinstance(own, Mapping):
                raise self.odd(name, {key: own}, allowed)
            record = {**self.record, **own}
            found[int(key)] = ConfigValues(record, f"{name} of layer {key}, {self.where}")
        return found

    def missing(self, names: Sequence[str], allowed: str) -> InvalidInputError:
        """Return the error for keys of which one is needed."""
        return self._error(" or ".join(names), "missing", allowed)

    def odd(self, name: str, value: object, allowed: str, *, hint: str = "") -> InvalidInputError:
        """Return the error for a value that cannot be."""
        return self._error(name, repr(value), allowed, hint)

    def _error(self, name: str, shown: str, allowed: str, hint: str = "") -> InvalidInputError:
        return InvalidInputError.for_argument(f"{name} in {self.where}", shown, allowed, hint=hint)

    def _first(self, names: Sequence[str]) -> tuple[str, Any]:
        for name in names:
            if self.record.get(name) is not None:
                return name, self.record[name]
        return names[0], None


def _is_list_of(value: object, kind: type) -> bool:
    return isinstance(value, list) and all(
        isinstance(item, kind) and not isinstance(item, bool) for item in value
    )
