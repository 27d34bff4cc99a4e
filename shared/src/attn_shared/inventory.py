"""What is installed: vendor libraries as frozen records, found without loading them."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Literal

from attn_shared._fields import CachedHash
from attn_shared.errors import UnknownNameError, own_words

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
    AVOIDED = "avoided"
    """Left aside by the caller's policy, whatever it is."""


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
    """What is known of one vendor library; `install` is "" where no installed package knows it."""

    name: str
    status: VendorStatus
    install: str = ""
    distribution: str | None = None
    version: str | None = None
    build: VendorBuild | None = None
    error: str | None = None

    @property
    def is_usable(self) -> bool:
        """Whether a backend may count on it (present, not avoided, not known to be broken)."""
        unusable = (VendorStatus.ABSENT, VendorStatus.BROKEN, VendorStatus.AVOIDED)
        return self.status not in unusable

    def describe(self) -> str:
        """Say in one line what is known, with the command that would mend an absence."""
        title = self.name if self.version is None else f"{self.name} {self.version}"
        if self.is_usable:
            return f"{title} ({self.status})"
        if self.status is VendorStatus.AVOIDED:
            return f"{title} is left aside: the policy avoids it"
        if self.status is VendorStatus.BROKEN:
            remedy = f"; to install it again: {self.install}" if self.install else ""
            return f"{title} failed to load: {self.error}{remedy}"
        if not self.install:
            return f"{self.name} is a library that no installed platform package declares"
        return f"{self.name} is not installed; to install it: {self.install}"

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
class Inventory(CachedHash):
    """The vendor libraries of one process, frozen; part of every selection's key."""

    entries: tuple[VendorEntry, ...] = ()

    __hash__ = CachedHash.__hash__

    def get(self, name: str) -> VendorEntry:
        """Return what is known of a library; one that nobody looked for is absent."""
        for entry in self.entries:
            if entry.name == name:
                return entry
        return VendorEntry(name=name, status=VendorStatus.ABSENT)

    def with_entry(self, entry: VendorEntry) -> Inventory:
        """Return an inventory in which `entry` replaces what was known under its name."""
        others = tuple(known for known in self.entries if known.name != entry.name)
        return Inventory((*others, entry))

    def with_broken(self, name: str, error: BaseException | str) -> Inventory:
        """Return an inventory in which `name` is known to fail, with its own words."""
        words = error if isinstance(error, str) else own_words(error)
        return self.with_entry(
            replace(self.get(name), status=VendorStatus.BROKEN, build=None, error=words)
        )

    def without(self, names: Iterable[str]) -> Inventory:
        """Return an inventory in which some libraries are left aside.

        Raises:
            UnknownNameError: one of them is no library of this inventory.
        """
        avoided = frozenset(self.require_known(names))
        if not avoided:
            return self
        entries = (
            replace(entry, status=VendorStatus.AVOIDED) if entry.name in avoided else entry
            for entry in self.entries
        )
        return Inventory(tuple(entries))

    def require_known(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the names, all of which are libraries of this inventory.

        Raises:
            UnknownNameError: one of them is not; lists those that are.
        """
        wanted, known = tuple(names), [entry.name for entry in self.entries]
        for name in wanted:
            if name not in known:
                raise UnknownNameError.for_name("vendor library", name, known)
        return wanted


def scan(specs: Iterable[VendorSpec]) -> Inventory:
    """Look at installed metadata only: no vendor module is imported."""
    return Inventory(tuple(_scan_one(spec) for spec in specs))


def _scan_one(spec: VendorSpec) -> VendorEntry:
    distribution, version = _installed_distribution(spec.distributions)
    is_there = distribution is not None or _is_importable(spec.module)
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


def _is_importable(module: str) -> bool:
    """Whether a top-level module has a place on the path; a library may come without metadata.

    A sub-module is never looked for: that would import its parents.
    """
    if "." in module:
        return False
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def probe(specs: Iterable[VendorSpec], names: Iterable[str], known: Inventory) -> Inventory:
    """Import the named libraries and record what they are; a failure becomes "broken".

    Only what is present and not loaded is imported; the rest stays as it is known.

    Raises:
        UnknownNameError: no spec declares one of the names.
    """
    by_name = {spec.name: spec for spec in specs}
    for name in names:
        if name not in by_name:
            raise UnknownNameError.for_name("vendor library", name, by_name)
        if known.get(name).status is VendorStatus.PRESENT:
            known = _probe_one(by_name[name], known)
    return known


def _probe_one(spec: VendorSpec, known: Inventory) -> Inventory:
    # A vendor's import may raise anything: OSError of a loader, RuntimeError without a driver,
    # AttributeError of a half-built wheel, even SystemExit. Each means "broken", in its own words.
    try:
        build = _call_probe(spec)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001
        return known.with_broken(spec.name, error)
    entry = replace(
        known.get(spec.name), status=VendorStatus.LOADED, version=build.version, build=build
    )
    return known.with_entry(entry)


def _call_probe(spec: VendorSpec) -> VendorBuild:
    module, _, function = spec.probe.partition(":")
    build = getattr(importlib.import_module(module), function)()
    if not isinstance(build, VendorBuild):
        raise TypeError(f"{spec.probe} returned {build!r} instead of a VendorBuild")
    return build


def assume_all(specs: Iterable[VendorSpec]) -> Inventory:
    """Take every library as installed and complete, for a device that is not here."""
    return Inventory(
        tuple(
            VendorEntry(name=spec.name, status=VendorStatus.ASSUMED, install=spec.install)
            for spec in specs
        )
    )
