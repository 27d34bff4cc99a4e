"""What is read of a plugin: its entry point, its class, and what keeps the class from serving."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast

from attn_shared.backend import AttentionBackend
from attn_shared.errors import InvalidInputError
from attn_shared.mla_prefill import MLAPrefill

__all__ = [
    "API_VERSION",
    "BackendKind",
    "LoadFailure",
    "Registration",
    "api_problem",
    "backend_problem",
    "distribution_of",
    "import_path",
    "normalized_path",
    "path_of",
]

API_VERSION = 1
"""Version of the interface in `attn_shared.backend`; a backend declares the range it fits."""

BackendKind = Literal["attention", "mamba", "mla_prefill"]
"""Registries of names: a name is unique within its kind."""

_CLASSES: dict[BackendKind, type[AttentionBackend] | type[MLAPrefill]] = {
    "attention": AttentionBackend,
    "mla_prefill": MLAPrefill,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """One registered backend: a class, or the path of one that is loaded when needed.

    Attributes:
        name: the backend's name.
        path: "package.module:Class".
        distribution: what provides it: an installed distribution, or "register_backend".
        version: the distribution's version, or "".
        cls: the class, where it was given.
    """

    name: str
    path: str
    distribution: str
    version: str = ""
    cls: type[Any] | None = None

    @property
    def source(self) -> str:
        """The distribution with its version, for messages."""
        return f"{self.distribution} {self.version}".rstrip()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFailure:
    """A plugin that could not be used, with its own words."""

    entry_point: str
    distribution: str
    version: str
    error: str

    def __str__(self) -> str:
        """Read as one line."""
        source = f"{self.distribution} {self.version}".rstrip()
        return f"{self.entry_point} ({source}): {self.error}"


def distribution_of(entry_point: importlib.metadata.EntryPoint) -> tuple[str, str]:
    """Return name and version of the distribution that brings an entry point."""
    if entry_point.dist is None:
        return ("unknown distribution", "")
    return (entry_point.dist.name, entry_point.dist.version)


def normalized_path(path: str) -> str:
    """Return "package.module:Class" for that and for the dotted "package.module.Class".

    Raises:
        InvalidInputError: the text is neither.
    """
    module, separator, qualname = path.partition(":")
    if not separator:
        module, _, qualname = path.rpartition(".")
    if not all(part.isidentifier() for part in (*module.split("."), *qualname.split("."))):
        raise InvalidInputError.for_argument(
            "path of a backend", repr(path), "'package.module:Class' or 'package.module.Class'"
        )
    return f"{module}:{qualname}"


def path_of(target: str | type[Any]) -> str:
    """Return the normalised path of a class, or of a class that is named by its path."""
    if isinstance(target, str):
        return normalized_path(target)
    return f"{target.__module__}:{target.__qualname__}"


def import_path(path: str) -> type[Any]:
    """Import "package.module:Class"; whatever the import raises passes through."""
    module, _, qualname = path.partition(":")
    target: Any = importlib.import_module(module)
    for part in qualname.split("."):
        target = getattr(target, part)
    return cast("type[Any]", target)


def backend_problem(cls: object, name: str, kind: BackendKind = "attention") -> str | None:
    """Say what keeps a class from serving under a name, or None."""
    base = _CLASSES.get(kind)
    if base is None:
        return None
    if not (isinstance(cls, type) and issubclass(cls, base)):
        return f"{cls!r} is not a subclass of {base.__module__}.{base.__name__}"
    missing = sorted(cls.__abstractmethods__)
    if missing:
        return f"{cls.__name__} does not define {', '.join(missing)}"
    own_name = getattr(cls, "name", None)
    if own_name != name:
        return f"{cls.__name__}.name is {own_name!r}, and it is registered as {name!r}"
    rank = cls.auto_priority
    if rank is not None and (isinstance(rank, bool) or not isinstance(rank, int)):
        return f"{cls.__name__}.auto_priority is {rank!r}, not an int or None"
    loads = cls.load_vendor.__func__ is not base.load_vendor.__func__  # type: ignore[attr-defined]
    if cls.vendor_libraries and not loads:
        return f"{cls.__name__} names vendor_libraries and does not define load_vendor"
    return api_problem(cls.attn_api)


_COMPARE: dict[str, Callable[[int, int], bool]] = {
    ">=": lambda a, b: a >= b,
    "<=": lambda a, b: a <= b,
    "==": lambda a, b: a == b,
    "<": lambda a, b: a < b,
    ">": lambda a, b: a > b,
}


def api_problem(declared: object) -> str | None:
    """Say why a declared range ">=1,<2" does not admit `API_VERSION`, or None if it does."""
    if not declared:
        return f'it declares no attn_api; write attn_api = ">={API_VERSION},<{API_VERSION + 1}"'
    for bound in str(declared).replace(" ", "").split(","):
        sign = bound.rstrip("0123456789")
        number = bound[len(sign) :]
        if sign not in _COMPARE or not number:
            return f'attn_api={declared!r} is not a list of bounds such as ">=1,<2"'
        if not _COMPARE[sign](API_VERSION, int(number)):
            return f"it needs attn_api {declared}, and this attn-shared has {API_VERSION}"
    return None
