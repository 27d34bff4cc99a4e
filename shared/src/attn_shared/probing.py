"""What probes of vendor libraries share: import, version, build flags, optional arguments."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any

__all__ = [
    "argument_names",
    "build_flags",
    "import_library",
    "installed_version",
    "optional_arguments",
    "require",
]


def import_library(module: str) -> ModuleType:
    """Import a vendor's module.

    Raises:
        ImportError: the module ended the process instead of failing (some do when torch has
            another version than they want). What else its import raises passes through.
    """
    try:
        return importlib.import_module(module)
    except SystemExit as error:
        raise ImportError(
            f"{module} ended the process while it was imported (exit status {error.code})"
        ) from error


def require(module: ModuleType, name: str, hint: str) -> Any:
    """Return what a module calls `name`.

    Raises:
        ImportError: it has no such thing; names it, the module's place, and `hint`.
    """
    try:
        return getattr(module, name)
    except AttributeError as error:
        place = getattr(module, "__file__", None) or "a namespace package"
        raise ImportError(f"{module.__name__} ({place}) has no {name}: {hint}") from error


def installed_version(distributions: Iterable[str]) -> str:
    """Return the version of the first of these distributions that is installed, or "unknown"."""
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"


def build_flags(values: Mapping[str, object]) -> tuple[tuple[str, str], ...]:
    """Return flags as `VendorBuild` keeps them: sorted, booleans as "on" and "off"."""
    return tuple((name, _flag_text(values[name])) for name in sorted(values))


def _flag_text(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value)


def optional_arguments(
    calls: Mapping[str, Callable[..., object] | None], names: Iterable[str]
) -> frozenset[str]:
    """Return which of the arguments `names` each call has, as "call.argument".

    A call that is None (this release has none of that name) or that hides its signature has none
    of them: an argument counts only where it can be seen.
    """
    wanted = frozenset(names)
    return frozenset(
        f"{call}.{argument}"
        for call, function in calls.items()
        for argument in argument_names(function)
        if argument in wanted
    )


def argument_names(function: Callable[..., object] | None) -> tuple[str, ...]:
    """Return what a call takes, in order: of an operator of torch its schema says it.

    Nothing for None, and for a function in C without a signature.
    """
    if function is None:
        return ()
    schema = getattr(function, "_schema", None)
    if schema is not None:
        return tuple(argument.name for argument in schema.arguments)
    try:
        return tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return ()
