"""Which backends and platforms exist: names, entry points, overrides, and what failed to load.

First-party backends and third parties' use one mechanism, the entry-point groups `attn.platforms`
and `attn.backends`. They are listed on first use, and loaded only when needed; a plugin that
fails to load disables itself only, and its failure is kept to be shown.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, cast

from attn_shared.backend import AttentionBackend
from attn_shared.device import Vendor
from attn_shared.errors import (
    AttnError,
    BackendNotProvidedError,
    DuplicateNameError,
    PluginError,
    UnknownNameError,
)
from attn_shared.known_backends import KNOWN_BACKENDS, KNOWN_MAMBA_BACKENDS, KnownBackend
from attn_shared.platform import Platform

__all__ = [
    "API_VERSION",
    "BACKEND_GROUP",
    "DEFAULT_REGISTRY",
    "PLATFORM_GROUP",
    "BackendKind",
    "BackendRegistry",
    "LoadFailure",
    "Registration",
    "api_problem",
]

API_VERSION = 1
"""Version of the interface in `attn_shared.backend`; a backend declares the range it fits."""

PLATFORM_GROUP = "attn.platforms"
BACKEND_GROUP = "attn.backends"

BackendKind = Literal["attention", "mamba"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """One registered backend: a class, or the path of one that is loaded when needed.

    Attributes:
        name: the backend's name.
        path: "package.module:Class".
        source: the distribution with its version, or where `register_backend` was called for.
        cls: the class, where it was given.
    """

    name: str
    path: str
    source: str
    cls: type[Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFailure:
    """A plugin that could not be used, with its own words."""

    entry_point: str
    distribution: str
    version: str
    error: str

    def __str__(self) -> str:
        """Read as one line."""
        return f"{self.entry_point} of {self.distribution} {self.version}: {self.error}"


class BackendRegistry:
    """Names of backends and platforms of this process.

    `generation` grows with every change, so that a cache in front of selection can tell.
    """

    def __init__(
        self,
        entry_points: Callable[[str], Iterable[importlib.metadata.EntryPoint]] | None = None,
    ) -> None:
        """Start empty; entry points are listed on first use.

        Args:
            entry_points: group -> its entry points; the installed ones by default.
        """
        self.generation = 0
        self._entry_points = entry_points or _installed_entry_points
        self._registered: dict[tuple[BackendKind, str], Registration] = {}
        self._overrides: dict[tuple[BackendKind, str], Registration] = {}
        self._duplicates: dict[tuple[BackendKind, str], str] = {}
        self._platforms: dict[str, Platform] | None = None
        self._failures: dict[str, LoadFailure] = {}
        self._is_discovered = False

    # Backends

    def names(self, kind: BackendKind = "attention") -> tuple[str, ...]:
        """Return the names that some distribution or registration provides."""
        self._discover()
        keys = {**self._registered, **self._overrides}
        return tuple(sorted(name for owner, name in keys if owner == kind))

    def third_party_names(self) -> tuple[str, ...]:
        """Return the attention backends that are not among the field's known names."""
        return tuple(name for name in self.names() if name not in KNOWN_BACKENDS)

    def unprovided(self, vendor: Vendor) -> dict[str, KnownBackend]:
        """Return the known names for a vendor's devices that nothing installed provides."""
        provided = set(self.names())
        return {
            name: known
            for name, known in KNOWN_BACKENDS.items()
            if vendor in known.vendors and name not in provided
        }

    def get(self, name: str, kind: BackendKind = "attention") -> Registration:
        """Return the registration of a name, an override before the original.

        Raises:
            DuplicateNameError: two distributions claim the name.
            BackendNotProvidedError: the field knows the name, and nothing installed provides it.
            UnknownNameError: nobody knows the name.
        """
        self._discover()
        key = (kind, name)
        if key in self._overrides:
            return self._overrides[key]
        if key in self._duplicates:
            raise DuplicateNameError(
                self._duplicates[key], hint="uninstall one of the two distributions."
            )
        if key in self._registered:
            return self._registered[key]
        known = (KNOWN_BACKENDS if kind == "attention" else KNOWN_MAMBA_BACKENDS).get(name)
        if known is not None:
            raise _not_provided(name, known, self.names(kind))
        raise UnknownNameError.for_name("backend", name, self.names(kind))

    def load(self, name: str, kind: BackendKind = "attention") -> type[Any]:
        """Return the class behind a name, importing it if need be.

        Raises:
            PluginError: it cannot be imported, is not a backend, or fits another interface.
        """
        registration = self.get(name, kind)
        if registration.cls is not None:
            return registration.cls
        # A plugin may raise anything while it is imported; that is its own failure only.
        try:
            cls = _import_path(registration.path)
        except Exception as error:
            raise self._failed(registration, error) from error
        if kind == "attention":
            problem = _problem_of(cls, name)
            if problem:
                raise self._failed(registration, problem)
        return cls

    def _failed(self, registration: Registration, error: Exception | str) -> PluginError:
        words = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        distribution, _, version = registration.source.partition(" ")
        failure = LoadFailure(
            entry_point=f"{registration.name} = {registration.path}",
            distribution=distribution,
            version=version,
            error=words,
        )
        self._failures[registration.name] = failure
        return PluginError(f"backend {registration.name} failed to load: {failure}")

    def register(
        self,
        name: str,
        target: str | type[Any],
        *,
        kind: BackendKind = "attention",
        source: str = "register_backend",
    ) -> None:
        """Provide a name, or override the installed provider of one.

        Args:
            name: the backend's name.
            target: the class, or its path "package.module:Class".
            kind: which registry the name belongs to.
            source: who registers, for messages.

        Raises:
            DuplicateNameError: the name was registered this way before and not cleared.
        """
        self._discover()
        key = (kind, name)
        if key in self._overrides and self._overrides[key].path != _path_of(target):
            raise DuplicateNameError(
                f"{name} is already registered as {self._overrides[key].path} by "
                f"{self._overrides[key].source}.",
                hint=f"call clear_override({name!r}) first.",
            )
        self._overrides[key] = Registration(
            name=name,
            path=_path_of(target),
            source=source,
            cls=None if isinstance(target, str) else target,
        )
        self.generation += 1

    def is_overridden(self, name: str, kind: BackendKind = "attention") -> bool:
        """Whether `register` replaced or added this name."""
        return (kind, name) in self._overrides

    def clear_override(self, name: str, kind: BackendKind = "attention") -> None:
        """Undo `register` of a name; nothing happens if there was none."""
        if self._overrides.pop((kind, name), None) is not None:
            self.generation += 1

    # Platforms

    def platforms(self) -> dict[str, Platform]:
        """Return the installed platforms by name."""
        self._discover()
        if self._platforms is None:
            self._platforms = self._load_platforms()
        return self._platforms

    def platform_for(self, vendor: Vendor) -> Platform:
        """Return the platform of a vendor's devices.

        Raises:
            UnknownNameError: no installed package brings it.
        """
        for platform in self.platforms().values():
            if platform.vendor is vendor:
                return platform
        raise UnknownNameError.for_name(
            "platform for vendor",
            str(vendor),
            (str(platform.vendor) for platform in self.platforms().values()),
            hint=f"pip install {_PLATFORM_DISTRIBUTIONS[vendor]}",
        )

    def failures(self) -> tuple[LoadFailure, ...]:
        """Return the plugins that could not be used so far."""
        self.platforms()
        return tuple(self._failures.values())

    # Discovery

    def _discover(self) -> None:
        if self._is_discovered:
            return
        self._is_discovered = True
        for entry_point in self._entry_points(BACKEND_GROUP):
            self._add_entry_point(entry_point)

    def _add_entry_point(self, entry_point: importlib.metadata.EntryPoint) -> None:
        key: tuple[BackendKind, str] = ("attention", entry_point.name)
        found = Registration(
            name=entry_point.name,
            path=entry_point.value,
            source=" ".join(_distribution_of(entry_point)),
        )
        first = self._registered.setdefault(key, found)
        if first != found:
            self._duplicates[key] = (
                f"two distributions provide backend {entry_point.name}: {first.source} "
                f"({first.path}) and {found.source} ({found.path})."
            )

    def _load_platforms(self) -> dict[str, Platform]:
        loaded: dict[str, Platform] = {}
        for entry_point in self._entry_points(PLATFORM_GROUP):
            # As for backends: whatever a plugin raises disables that plugin, and is shown.
            try:
                platform = entry_point.load()()
            except Exception as error:
                self._failures[f"platform {entry_point.name}"] = _failure(entry_point, error)
                continue
            if platform.name in loaded:
                raise DuplicateNameError(
                    f"two distributions provide platform {platform.name}: "
                    f"{loaded[platform.name].distribution} and {platform.distribution}."
                )
            loaded[platform.name] = platform
        return dict(sorted(loaded.items(), key=lambda item: item[1].precedence))


_PLATFORM_DISTRIBUTIONS = {
    Vendor.NVIDIA: "attn-cuda",
    Vendor.AMD: "attn-rocm",
    Vendor.INTEL: "attn-xpu",
    Vendor.CPU: "attn-cpu",
}


def _installed_entry_points(group: str) -> Iterable[importlib.metadata.EntryPoint]:
    return importlib.metadata.entry_points(group=group)


def _distribution_of(entry_point: importlib.metadata.EntryPoint) -> tuple[str, str]:
    if entry_point.dist is None:
        return ("(unknown distribution)", "")
    return (entry_point.dist.name, entry_point.dist.version)


def _failure(entry_point: importlib.metadata.EntryPoint, error: Exception) -> LoadFailure:
    distribution, version = _distribution_of(entry_point)
    return LoadFailure(
        entry_point=f"{entry_point.name} = {entry_point.value}",
        distribution=distribution,
        version=version,
        error=f"{type(error).__name__}: {error}",
    )


def _not_provided(
    name: str, known: KnownBackend, provided: Iterable[str]
) -> BackendNotProvidedError:
    plan = "planned" if known.is_planned else "not planned"
    return BackendNotProvidedError(
        f"backend {name!r} is known ({known.family}, {known.kernels}) and not provided by any "
        f"installed distribution ({plan}); provided: {', '.join(sorted(provided)) or '(none)'}."
    )


def _import_path(path: str) -> type[Any]:
    module, separator, qualname = path.partition(":")
    if not separator:  # the dotted form of the field, "package.module.Class"
        module, _, qualname = path.rpartition(".")
    target: Any = importlib.import_module(module)
    for part in qualname.split("."):
        target = getattr(target, part)
    return cast("type[Any]", target)


def _path_of(target: str | type[Any]) -> str:
    if isinstance(target, str):
        return target
    return f"{target.__module__}:{target.__qualname__}"


def _problem_of(cls: object, name: str) -> str | None:
    """Say what keeps a class from serving as the backend `name`, or None."""
    if not (isinstance(cls, type) and issubclass(cls, AttentionBackend)):
        return f"{cls!r} is not a subclass of attn_shared.backend.AttentionBackend"
    if getattr(cls, "name", None) != name:
        return f"its class is named {getattr(cls, 'name', None)!r}, registered as {name!r}"
    return api_problem(cls.attn_api)


_BOUND = re.compile(r"^(>=|<=|==|<|>)(\d+)$")


def api_problem(declared: str) -> str | None:
    """Say why a declared range ">=1,<2" does not admit `API_VERSION`, or None if it does."""
    if not declared:
        return f'it declares no attn_api; write attn_api = ">={API_VERSION},<{API_VERSION + 1}"'
    for bound in declared.split(","):
        match = _BOUND.match(bound.strip())
        if match is None:
            return f'attn_api={declared!r} is not a list of bounds such as ">=1,<2"'
        if not _COMPARE[match[1]](API_VERSION, int(match[2])):
            return f"it needs attn_api {declared}, and this attn-shared has {API_VERSION}"
    return None


_COMPARE: dict[str, Callable[[int, int], bool]] = {
    ">=": lambda a, b: a >= b,
    "<=": lambda a, b: a <= b,
    "==": lambda a, b: a == b,
    "<": lambda a, b: a < b,
    ">": lambda a, b: a > b,
}

DEFAULT_REGISTRY = BackendRegistry()
"""The registry of this process."""
