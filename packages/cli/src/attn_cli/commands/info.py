"""`attn info`: platforms, devices, vendor libraries, and what is wrong with any of them."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from attn_cli.environment import settings_record
from attn_cli.exit_codes import FAILURES_FOUND
from attn_cli.options import Panel
from attn_cli.output import OutputFlags, console, emit
from attn_cli.schema import SCHEMA_VERSION

if TYPE_CHECKING:
    from rich.console import RenderableType

    from attn_shared.inventory import Inventory
    from attn_shared.platform import Platform
    from attn_shared.registry import BackendRegistry

__all__ = ["InfoFlags", "info"]


@dataclass(frozen=True, slots=True, kw_only=True)
class InfoFlags:
    """How far `attn info` looks."""

    probe: Annotated[
        bool,
        Panel().flag(
            "--probe",
            "Import each installed vendor library; exit code 1 if one of this machine's own, or a "
            "plugin, fails to load.",
        ),
    ] = False


def info(flags: InfoFlags, output: OutputFlags) -> int:
    """Show platforms, devices, vendor libraries, versions and settings of this machine.

    Vendor libraries are looked up, not imported, unless --probe is given.
    """
    from attn_shared.registry import DEFAULT_REGISTRY
    from attn_shared.settings import from_environ

    settings = from_environ()
    platforms = list(DEFAULT_REGISTRY.platforms().values())
    inventories = {p.name: _inventory(p, flags, output) for p in platforms}
    load_every_backend(DEFAULT_REGISTRY)
    current = next((p.name for p in platforms if p.availability().is_available), None)
    record: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "versions": _versions(platforms),
        "torch": _torch_build(),
        "current_platform": current,
        "platforms": [_platform_record(p, inventories[p.name]) for p in platforms],
        "failures": failure_records(DEFAULT_REGISTRY),
        "settings": settings_record(settings),
    }
    emit(record, output, tables=lambda: _tables(record), bare=[current or "none"])
    return FAILURES_FOUND if flags.probe and _has_failures(record) else 0


def load_every_backend(registry: BackendRegistry) -> None:
    """Load all backends, so that the registry's failures are complete."""
    from attn_shared.errors import AttnError

    for name in registry.names():
        try:
            registry.load(name)
        except AttnError:
            continue  # the registry keeps it, and it is shown from there


def failure_records(registry: BackendRegistry) -> list[dict[str, str]]:
    """Return the plugins that could not be used as JSON-safe values."""
    return [
        {
            "entry_point": failure.entry_point,
            "distribution": failure.distribution,
            "version": failure.version,
            "error": failure.error,
        }
        for failure in registry.failures()
    ]


def _inventory(platform: Platform, flags: InfoFlags, output: OutputFlags) -> Inventory:
    from attn_shared.inventory import VendorStatus, probe, scan

    specs = platform.vendor_specs()
    inventory = scan(specs)
    if not flags.probe:
        return inventory
    present = [e.name for e in inventory.entries if e.status is VendorStatus.PRESENT]
    for name in _with_progress(present, f"probing libraries of {platform.name}", output):
        inventory = probe(specs, [name], inventory)
    return inventory


def _with_progress(names: Sequence[str], title: str, output: OutputFlags) -> Iterable[str]:
    """Yield the names behind a progress bar on stderr; none where that is no terminal."""
    if not names or output.quiet or not sys.stderr.isatty():
        return names
    from rich.progress import track

    return track(names, description=title, console=console(stderr=True), transient=True)


def _versions(platforms: Iterable[Platform]) -> dict[str, str]:
    """Return the versions of Python and of the project's installed distributions."""
    own = ["attn-shared", "attn-cli", "attn-torch", "attn-triton", "attn-transformers"]
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in dict.fromkeys([*own, *(p.distribution for p in platforms)]):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # not installed, or used from a checkout
    return found


def _torch_build() -> dict[str, Any]:
    import torch

    return {
        "version": str(torch.__version__),
        "git_version": torch.version.git_version,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "xpu": getattr(torch.version, "xpu", None),
    }


def _platform_record(platform: Platform, inventory: Inventory) -> dict[str, Any]:
    availability = platform.availability()
    return {
        "name": platform.name,
        "vendor": str(platform.vendor),
        "distribution": platform.distribution,
        "torch_device_type": platform.torch_device_type,
        "available": availability.is_available,
        "reason": availability.reason,
        "versions": platform.versions(),
        "devices": [device.to_dict() for device in platform.devices()],
        "vendor_libraries": [entry.to_dict() for entry in inventory.entries],
    }


def _has_failures(record: dict[str, Any]) -> bool:
    """Whether a plugin, or a library that this machine has devices for, failed to load.

    A library of another vendor's devices may well refuse to load here; it is shown, no more.
    """
    here = [platform for platform in record["platforms"] if platform["available"]]
    libraries = [entry for platform in here for entry in platform["vendor_libraries"]]
    return bool(record["failures"]) or any(entry["status"] == "broken" for entry in libraries)


def _tables(record: dict[str, Any]) -> Iterable[RenderableType]:
    from attn_cli.views.info import info_tables

    return info_tables(record)
