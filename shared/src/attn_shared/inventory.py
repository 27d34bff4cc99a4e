"""What is installed: vendor libraries as frozen records, found without loading them."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from attn_shared.errors import UnknownNameError

__all__ = [
    "Inventory",
    "VendorBuild",
    "VendorEntry",
    "VendorSpec",
    "VendorStatus",
    "assume_all",
    "probe",
    "scan",
]


class VendorStatus(StrEnum):
    """How much is known of one vendor library."""

    ABSENT = "absent"
    PRESENT = "present"
    """Installed, not loaded: the version is known, its build is not."""
    LOADED = "loaded"
    BROKEN = "broken"
    """Installed, and failed to load; `error` holds its own words."""
    ASSUMED = "assumed"
    """Taken as installed and complete, for a device that is not here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VendorBuild:
    """What a loaded library turned out to be.

    Attributes:
        version: the distribution's version.
        flags: build flags as (name, value) pairs, sorted by name.
        kernel_lse_base: base of the kernel's own LSE, "e" or "2"; None if it returns none.
        optional_arguments: arguments of its calls that not every release has.
    """

    version: str
    flags: tuple[tuple[str, str], ...] = ()
    kernel_lse_base: Literal["e", "2"] | None = None
    optional_arguments: frozenset[str] = frozenset()

    def flag(self, name: str) -> str | None:
        """Return one build flag, or None where the build does not say."""
        return dict(self.flags).get(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class VendorSpec:
    """How to find one vendor library; declared by the platform that wraps it.

    Attributes:
        name: the library's name in the inventory, unique over all platforms ("flash_attn_3").
        distributions: names of distributions that bring it, the first installed one counts.
        module: the module whose presence is the sign of it.
        install: the command that installs it.
        probe: "package.module:function" that imports the library and returns a `VendorBuild`.
    """

    name: str
    distributions: tuple[str, ...]
    module: str
    install: str
    probe: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VendorEntry:
    """What is known of one vendor library."""

    name: str
    status: VendorStatus
    install: str = ""
    distribution: str | None = None
    version: str | None = None
    build: VendorBuild | None = None
    error: str | None = None

    @property
    def is_usable(self) -> bool:
        """Whether a backend may count on it (present and not known to be broken)."""
        return self.status not in (VendorStatus.ABSENT, VendorStatus.BROKEN)

    def describe(self) -> str:
        """Say in one line what is known, with the command that would mend an absence."""
        if self.status is VendorStatus.ABSENT:
            return f"{self.name} is not installed; {self.install}"
        if self.status is VendorStatus.BROKEN:
            return f"{self.name} {self.version or ''} failed to load: {self.error}"
        return f"{self.name} {self.version or ''} ({self.status})".replace("  ", " ")

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-safe values."""
        build = self.build
        return {
            "name": self.name,
            "status": str(self.status),
            "distribution": self.distribution,
            "version": self.version,
            "install": self.install,
            "error": self.error,
            "flags": dict(build.flags) if build else {},
            "kernel_lse_base": build.kernel_lse_base if build else None,
            "optional_arguments": sorted(build.optional_arguments) if build else [],
        }


@dataclass(frozen=True, slots=True)
class Inventory:
    """The vendor libraries of one process, frozen; part of every selection's key."""

    entries: tuple[VendorEntry, ...] = ()
    _by_name: Mapping[str, VendorEntry] = field(init=False, repr=False, compare=False, hash=False)
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Index by name, and hash once: this object is in the key of every cached selection."""
        object.__setattr__(self, "_by_name", {entry.name: entry for entry in self.entries})
        object.__setattr__(self, "_hash", hash(self.entries))

    def __hash__(self) -> int:
        """Return the hash computed at construction."""
        return self._hash

    def __reduce__(self) -> tuple[type[Inventory], tuple[tuple[VendorEntry, ...]]]:
        """Pickle the entries alone: strings hash differently in another process."""
        return (Inventory, (self.entries,))

    def get(self, name: str) -> VendorEntry:
        """Return what is known of a library; one that nobody looked for is absent."""
        entry = self._by_name.get(name)
        return entry or VendorEntry(
            name=name, status=VendorStatus.ABSENT, install="no platform package declares it"
        )

    def with_entry(self, entry: VendorEntry) -> Inventory:
        """Return an inventory in which `entry` replaces what was known under its name."""
        others = tuple(known for known in self.entries if known.name != entry.name)
        return Inventory((*others, entry))

    def with_broken(self, name: str, error: BaseException | str) -> Inventory:
        """Return an inventory in which `name` is known to fail, with its own words."""
        known = self.get(name)
        words = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        return self.with_entry(
            VendorEntry(
                name=name,
                status=VendorStatus.BROKEN,
                install=known.install,
                distribution=known.distribution,
                version=known.version,
                error=words,
            )
        )


def scan(specs: Iterable[VendorSpec]) -> Inventory:
    """Look at installed metadata only: no vendor module is imported."""
    return Inventory(tuple(_scan_one(spec) for spec in specs))


def _scan_one(spec: VendorSpec) -> VendorEntry:
    distribution, version = _installed_distribution(spec.distributions)
    is_there = version is not None or _module_exists(spec.module)
    return VendorEntry(
        name=spec.name,
        status=VendorStatus.PRESENT if is_there else VendorStatus.ABSENT,
        install=spec.install,
        distribution=distribution,
        version=version,
    )


def _installed_distribution(names: Iterable[str]) -> tuple[str | None, str | None]:
    for name in names:
        try:
            return name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None, None


def _module_exists(module: str) -> bool:
    """Whether the top-level package is importable; sub-modules would import their parents."""
    top_level = module.partition(".")[0]
    try:
        return importlib.util.find_spec(top_level) is not None and top_level == module
    except (ImportError, ValueError):
        return False


def probe(specs: Iterable[VendorSpec], names: Iterable[str], known: Inventory) -> Inventory:
    """Import the named libraries and record what they are; a failure becomes "broken".

    Raises:
        UnknownNameError: no spec declares one of the names.
    """
    by_name = {spec.name: spec for spec in specs}
    for name in names:
        if name not in by_name:
            raise UnknownNameError.for_name("vendor library", name, by_name)
        entry = known.get(name)
        if entry.status is VendorStatus.PRESENT:
            known = _probe_one(by_name[name], known)
    return known


def _probe_one(spec: VendorSpec, known: Inventory) -> Inventory:
    entry = known.get(spec.name)
    module, _, function = spec.probe.partition(":")
    # A vendor's import may raise anything (OSError of a loader, RuntimeError without a driver,
    # AttributeError of a half-built wheel): each one means "broken" and is shown to the user.
    try:
        build: VendorBuild = getattr(importlib.import_module(module), function)()
    except Exception as error:
        return known.with_broken(spec.name, error)
    return known.with_entry(
        VendorEntry(
            name=spec.name,
            status=VendorStatus.LOADED,
            install=spec.install,
            distribution=entry.distribution,
            version=build.version,
            build=build,
        )
    )


def assume_all(specs: Iterable[VendorSpec]) -> Inventory:
    """Take every library as installed and complete, for a device that is not here."""
    return Inventory(
        tuple(
            VendorEntry(name=spec.name, status=VendorStatus.ASSUMED, install=spec.install)
            for spec in specs
        )
    )
