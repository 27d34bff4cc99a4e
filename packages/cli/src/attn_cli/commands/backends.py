"""`attn list`: every backend, who provides it, and for whose devices it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from attn_cli.commands.info import failure_records, load_every_backend
from attn_cli.options import Panel
from attn_cli.output import OutputFlags, emit
from attn_cli.schema import SCHEMA_VERSION

if TYPE_CHECKING:
    from rich.console import RenderableType

    from attn_shared.capability import Capability
    from attn_shared.errors import AttnError
    from attn_shared.known_backends import KnownBackend
    from attn_shared.registry import BackendKind, BackendRegistry

__all__ = ["ListFlags", "list_backends"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ListFlags:
    """Which names `attn list` shows."""

    show_all: Annotated[
        bool, Panel().flag("--all", "Also show names that are known and that nothing provides.")
    ] = False


def list_backends(flags: ListFlags, output: OutputFlags) -> int:
    """List the backends, who provides them, and for whose devices they are.

    With --quiet the names alone are printed, without those of what prefills for MLA backends.
    """
    from attn_shared.registry import DEFAULT_REGISTRY

    load_every_backend(DEFAULT_REGISTRY)
    kinds: tuple[BackendKind, ...] = ("attention", "mla_prefill", "mamba")
    every = [row for kind in kinds for row in backend_records(DEFAULT_REGISTRY, kind)]
    shown = [row for row in every if flags.show_all or row["status"] != "not provided"]
    record: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "backends": shown,
        "not_shown": len(every) - len(shown),
        "failures": failure_records(DEFAULT_REGISTRY),
    }
    names = [row["name"] for row in shown if row["kind"] != "mla_prefill"]
    emit(record, output, tables=lambda: _tables(record), bare=names)
    return 0


def backend_records(registry: BackendRegistry, kind: BackendKind) -> list[dict[str, Any]]:
    """Return all backends of a kind as JSON-safe values: provided ones, then known names."""
    known = known_of_kind(kind)
    provided = registry.names(kind)
    names = [*provided, *(name for name in known if name not in provided)]
    return [_record(registry, name, kind, known.get(name)) for name in names]


def known_of_kind(kind: BackendKind) -> Mapping[str, KnownBackend]:
    """Return the names of a kind that the field knows."""
    from attn_shared import known_backends

    return {
        "attention": known_backends.KNOWN_BACKENDS,
        "mla_prefill": known_backends.KNOWN_MLA_PREFILLS,
        "mamba": known_backends.KNOWN_MAMBA_BACKENDS,
    }[kind]


def _record(registry: BackendRegistry, name: str, kind: BackendKind, known: Any) -> dict[str, Any]:
    from attn_shared.errors import AttnError, BackendNotProvidedError

    record: dict[str, Any] = {
        "name": name,
        "kind": kind,
        "status": "provided",
        "provided_by": None,
        "path": None,
        "family": None if known is None else known.family,
        "vendors": [] if known is None else [str(vendor) for vendor in known.vendors],
        "description": "" if known is None else known.kernels,
        "is_known": known is not None,
        "is_planned": known is not None and known.is_planned,
        "error": None,
    }
    try:
        registration = registry.get(name, kind)
        record |= {"provided_by": registration.source, "path": registration.path}
        return record | _facts_of_class(registry.load(name, kind), known)
    except BackendNotProvidedError:
        return record | {"status": "not provided"}
    except AttnError as error:
        return record | {"status": "failed", "error": _error_record(error)}


def _error_record(error: AttnError) -> dict[str, str]:
    return {"class": type(error).__name__, "message": error.message, "hint": error.hint}


def _facts_of_class(backend: Any, known: Any) -> dict[str, Any]:
    """Return what the class itself says; where the name is known, the table says the rest."""
    facts: dict[str, Any] = {}
    if getattr(backend, "description", ""):
        facts["description"] = backend.description
    if known is None:
        capabilities = list(_capabilities_of(backend))
        vendors = {str(limit.vendor) for found in capabilities for limit in found.devices}
        facts["vendors"] = sorted(vendors)
        facts["family"] = _family(capabilities)
    return facts


def _family(capabilities: Sequence[Capability]) -> str | None:
    if not capabilities:
        return None
    is_mla = any(found.is_mla for found in capabilities)
    is_sparse = any(found.is_sparse for found in capabilities)
    return f"{'sparse_' if is_sparse else ''}{'mla' if is_mla else 'mha'}"


def _capabilities_of(backend: Any) -> Iterator[Capability]:
    """Ask a backend that no table knows about one device of each vendor."""
    from attn_shared.device import PRESETS
    from attn_shared.inventory import Inventory

    one_of_each = {facts.vendor: facts for facts in PRESETS.values()}
    for device in one_of_each.values():
        # A third party's capability may raise anything; then nothing is known of this vendor.
        try:
            yield backend.capability(device, Inventory())
        except Exception:  # noqa: BLE001
            continue


def _tables(record: dict[str, Any]) -> Iterable[RenderableType]:
    from attn_cli.views.backends import backend_tables

    return backend_tables(record)
