"""Which backends and platforms exist: names, entry points, overrides, and what failed to load.

First-party backends and third parties' use one mechanism, the entry-point groups `attn.platforms`,
`attn.backends` and `attn.mla_prefills`. They are listed on first use, and loaded only when needed;
a plugin that fails to load disables itself only, and its failure is kept to be shown.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterable
from typing import Any

from attn_shared._plugins import (
    API_VERSION,
    BackendKind,
    LoadFailure,
    Registration,
    api_problem,
    backend_problem,
    distribution_of,
    import_path,
    path_of,
)
from attn_shared.device import Vendor
from attn_shared.errors import (
    BackendDefinitionError,
    BackendNotProvidedError,
    DuplicateNameError,
    PlatformMissingError,
    PluginError,
    UnknownNameError,
    nearest_name,
    own_words,
)
from attn_shared.known_backends import (
    KNOWN_BACKENDS,
    KNOWN_MAMBA_BACKENDS,
    KNOWN_MLA_PREFILLS,
    PLATFORM_DISTRIBUTIONS,
    KnownBackend,
)
from attn_shared.platform import Platform

__all__ = [
    "API_VERSION",
    "BACKEND_GROUP",
    "DEFAULT_REGISTRY",
    "MLA_PREFILL_GROUP",
    "PLATFORM_GROUP",
    "BackendKind",
    "BackendRegistry",
    "LoadFailure",
    "Registration",
    "api_problem",
]

PLATFORM_GROUP = "attn.platforms"
BACKEND_GROUP = "attn.backends"
MLA_PREFILL_GROUP = "attn.mla_prefills"

_GROUPS: dict[BackendKind, str] = {"attention": BACKEND_GROUP, "mla_prefill": MLA_PREFILL_GROUP}
_NOUNS: dict[BackendKind, str] = {"mla_prefill": "MLA prefill"}
_KNOWN = {
    "attention": KNOWN_BACKENDS,
    "mamba": KNOWN_MAMBA_BACKENDS,
    "mla_prefill": KNOWN_MLA_PREFILLS,
}

_Key = tuple[BackendKind, str]


class BackendRegistry:
    """Names of backends and platforms of this process.

    `generation` grows with every registration, so that a cache in front of selection can tell.
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
        self._registered: dict[_Key, Registration] = {}
        self._installed: dict[_Key, list[Registration]] | None = None
        self._platforms: dict[str, Platform] | None = None
        self._loaded: dict[Registration, type[Any]] = {}
        self._failures: dict[object, LoadFailure] = {}

    # Backends

    def names(self, kind: BackendKind = "attention") -> tuple[str, ...]:
        """Return the names that some distribution or registration provides."""
        keys = {*self._discovered(), *self._registered}
        return tuple(sorted(name for owner, name in keys if owner == kind))

    def third_party_names(self, kind: BackendKind = "attention") -> tuple[str, ...]:
        """Return the names of a kind that no platform is expected to offer.

        Those are the ones that the field does not know, those that it knows and attn does not plan
        to provide ("CUSTOM"), and whatever was registered in this process.
        """
        return tuple(
            name
            for name in self.names(kind)
            if self.is_overridden(name, kind)
            or name not in _KNOWN[kind]
            or not _KNOWN[kind][name].is_planned
        )

    def unprovided(self, vendor: Vendor) -> dict[str, KnownBackend]:
        """Return the known names for a vendor's devices that nothing installed provides."""
        provided = set(self.names())
        return {
            name: known
            for name, known in KNOWN_BACKENDS.items()
            if vendor in known.vendors and name not in provided
        }

    def get(self, name: str, kind: BackendKind = "attention") -> Registration:
        """Return the registration of a name, one of this process before an installed one.

        Raises:
            DuplicateNameError: two distributions claim the name.
            BackendNotProvidedError: the field knows the name, and nothing installed provides it.
            UnknownNameError: nobody knows the name.
        """
        key = (kind, name)
        if key in self._registered:
            return self._registered[key]
        installed = self._discovered().get(key, [])
        if len(installed) > 1:
            claims = " and ".join(f"{found.source} ({found.path})" for found in installed)
            raise DuplicateNameError(
                f"{_noun(kind)} {name} is provided by {claims}.",
                hint="uninstall all but one of these distributions.",
            )
        if installed:
            return installed[0]
        raise self._unknown(name, kind)

    def _unknown(self, name: str, kind: BackendKind) -> UnknownNameError:
        provided = self.names(kind)
        known = _KNOWN[kind].get(name)
        if known is not None:
            return BackendNotProvidedError(
                f"{_noun(kind)} {name!r} is known and not provided by any installed distribution "
                f"({known.family}, {known.kernels}; {known.plan}); provided: "
                f"{', '.join(provided) or '(none)'}."
            )
        near = nearest_name(name, {*provided, *_KNOWN[kind]})
        hint = f"did you mean {near!r}?" if near else ""
        if near and near not in provided:
            hint = f"did you mean {near!r}, which no installed distribution provides?"
        return UnknownNameError.for_name(_noun(kind), name, provided, hint=hint)

    def load(self, name: str, kind: BackendKind = "attention") -> type[Any]:
        """Return the class behind a name, importing it if need be.

        An import is tried once: a failure is kept until the name is registered anew.

        Raises:
            PluginError: it cannot be imported, is not a backend, or fits another interface.
            UnknownNameError, DuplicateNameError: as `get`.
        """
        registration = self.get(name, kind)
        if registration in self._loaded:
            return self._loaded[registration]
        if registration in self._failures:
            raise _plugin_error(name, self._failures[registration], kind)
        # A plugin may raise anything while it is imported; that is its own failure only.
        try:
            cls = registration.cls or import_path(registration.path)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise self._failed(registration, own_words(error), kind) from error
        problem = backend_problem(cls, name, kind)
        if problem is not None:
            raise self._failed(registration, problem, kind)
        self._loaded[registration] = cls
        return cls

    def _failed(self, registration: Registration, words: str, kind: BackendKind) -> PluginError:
        failure = LoadFailure(
            entry_point=f"{registration.name} = {registration.path}",
            distribution=registration.distribution,
            version=registration.version,
            error=words,
        )
        self._failures[registration] = failure
        return _plugin_error(registration.name, failure, kind)

    def register(
        self,
        name: str,
        target: str | type[Any],
        *,
        kind: BackendKind = "attention",
        source: str = "register_backend",
    ) -> None:
        """Provide a name in this process, before an installed provider of it.

        A class of the same path takes the place of the one before, as a notebook's cell does that
        is run again.

        Args:
            name: the backend's name.
            target: the class, or its path "package.module:Class".
            kind: which registry the name belongs to.
            source: who registers, for messages.

        Raises:
            BackendDefinitionError: the class cannot serve under this name.
            DuplicateNameError: the name was registered for another path and not cleared.
            InvalidInputError: the path has another form.
        """
        path, cls = path_of(target), None if isinstance(target, str) else target
        problem = backend_problem(cls, name, kind) if cls else None
        if problem is not None:
            raise BackendDefinitionError(f"{_noun(kind)} {name} cannot be registered: {problem}.")
        before = self._registered.get((kind, name))
        if before is not None and before.path != path:
            raise DuplicateNameError(
                f"{_noun(kind)} {name} is already registered as {before.path} by {before.source}.",
                hint=f"call clear_override({name!r}) first.",
            )
        self.clear_override(name, kind)
        self._registered[kind, name] = Registration(
            name=name, path=path, distribution=source, cls=cls
        )
        self.generation += 1

    def is_overridden(self, name: str, kind: BackendKind = "attention") -> bool:
        """Whether `register` replaced or added this name."""
        return (kind, name) in self._registered

    def clear_override(self, name: str, kind: BackendKind = "attention") -> None:
        """Undo `register` of a name; nothing happens if there was none."""
        registration = self._registered.pop((kind, name), None)
        if registration is not None:
            self._loaded.pop(registration, None)
            self._failures.pop(registration, None)
            self.generation += 1

    # Platforms

    def platforms(self) -> dict[str, Platform]:
        """Return the installed platforms by name, in their order of precedence.

        Raises:
            DuplicateNameError: two distributions bring a platform of one name.
        """
        if self._platforms is None:
            self._platforms = self._load_platforms()
        return self._platforms

    def platform_for(self, vendor: Vendor) -> Platform:
        """Return the platform of a vendor's devices.

        Raises:
            PlatformMissingError: no installed package brings it, or the one that does failed.
        """
        platforms = self.platforms()
        for platform in platforms.values():
            if platform.vendor is vendor:
                return platform
        found = [f"{platform.name} ({platform.distribution})" for platform in platforms.values()]
        failed = [f"{failure}" for failure in self.failures()]
        words = "; ".join([f"installed: {', '.join(found) or 'none'}", *failed])
        distribution = PLATFORM_DISTRIBUTIONS[vendor]
        folder = distribution.removeprefix("attn-")
        raise PlatformMissingError(
            f"no installed platform serves {vendor} devices; {words}.",
            hint=f"{distribution} does; in a checkout of attn: pip install ./platforms/{folder}",
        )

    def failures(self) -> tuple[LoadFailure, ...]:
        """Return the plugins that could not be used so far."""
        self.platforms()
        return tuple(self._failures.values())

    def _load_platforms(self) -> dict[str, Platform]:
        loaded: dict[str, tuple[Platform, str]] = {}
        for entry_point in self._entry_points(PLATFORM_GROUP):
            platform = self._load_platform(entry_point)
            if platform is None:
                continue
            source = " ".join(distribution_of(entry_point)).rstrip()
            _, known_source = loaded.get(platform.name, (platform, source))
            if known_source != source:
                raise DuplicateNameError(
                    f"platform {platform.name} is provided by {known_source} and {source}.",
                    hint="uninstall one of these distributions.",
                )
            loaded[platform.name] = (platform, source)
        ordered = sorted((platform for platform, _ in loaded.values()), key=_precedence)
        return {platform.name: platform for platform in ordered}

    def _load_platform(self, entry_point: importlib.metadata.EntryPoint) -> Platform | None:
        # As for backends: whatever a plugin raises disables that plugin, and is shown.
        try:
            platform = entry_point.load()()
            if not isinstance(platform, Platform):
                raise TypeError(f"{platform!r} is not an attn_shared.platform.Platform")
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001
            distribution, version = distribution_of(entry_point)
            self._failures["platform", entry_point.name] = LoadFailure(
                entry_point=f"{entry_point.name} = {entry_point.value}",
                distribution=distribution,
                version=version,
                error=own_words(error),
            )
            return None
        return platform

    # Discovery

    def _discovered(self) -> dict[_Key, list[Registration]]:
        """Return what installed distributions provide; a name with two entries is contested."""
        if self._installed is None:
            found: dict[_Key, list[Registration]] = {}
            for kind, group in _GROUPS.items():
                for entry_point in self._entry_points(group):
                    registration = _registration_of(entry_point)
                    claims = found.setdefault((kind, entry_point.name), [])
                    if registration not in claims:  # a folder may be on the path twice
                        claims.append(registration)
            self._installed = found
        return self._installed


def _installed_entry_points(group: str) -> Iterable[importlib.metadata.EntryPoint]:
    return importlib.metadata.entry_points(group=group)


def _registration_of(entry_point: importlib.metadata.EntryPoint) -> Registration:
    distribution, version = distribution_of(entry_point)
    return Registration(
        name=entry_point.name, path=entry_point.value, distribution=distribution, version=version
    )


def _precedence(platform: Platform) -> tuple[int, str]:
    return (platform.precedence, platform.name)


def _noun(kind: BackendKind) -> str:
    return _NOUNS.get(kind, "backend")


def _plugin_error(name: str, failure: LoadFailure, kind: BackendKind) -> PluginError:
    return PluginError(f"{_noun(kind)} {name} failed to load: {failure}")


DEFAULT_REGISTRY = BackendRegistry()
"""The registry of this process."""
