"""Which backend runs a request on a device, and why: a pure function, a cache, and an entry."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from attn_shared.backend import AttentionBackend
from attn_shared.device import DeviceFacts
from attn_shared.errors import (
    AttnError,
    BackendNotProvidedError,
    BackendRejectedError,
    NoBackendError,
    UnknownNameError,
    VendorMissingError,
)
from attn_shared.inventory import Inventory, assume_all, probe, scan
from attn_shared.platform import Candidate, Platform
from attn_shared.registry import DEFAULT_REGISTRY, BackendRegistry
from attn_shared.request import AttentionRequest
from attn_shared.selection import DecidedBy, Policy, Selection, Verdict, VerdictStatus
from attn_shared.verdicts import judge

__all__ = [
    "DEFAULT_SELECTOR",
    "SelectionCache",
    "Selector",
    "current_platform",
    "get_attn_backend",
    "get_mamba_attn_backend",
    "select",
]

_LOG = logging.getLogger("attn_shared")


def select(
    request: AttentionRequest,
    device: DeviceFacts,
    inventory: Inventory,
    policy: Policy | None = None,
    *,
    registry: BackendRegistry = DEFAULT_REGISTRY,
) -> Selection:
    """Choose the backend for a request on a device.

    Pure: reads no environment, imports no vendor library, mutates nothing. Precedence: what the
    model requires, then what the user named, then what was measured on this very device, then the
    platform's default order. A named backend serves or raises; only "auto" goes on to others.

    Args:
        request: what the model asks.
        device: where it runs, here or elsewhere.
        inventory: which vendor libraries are installed there.
        policy: who named what; None is "auto".
        registry: where names are looked up.

    Raises:
        UnknownNameError: a backend was named that nobody knows, or the device's platform is not
            installed.
        BackendRejectedError: the named backend cannot serve; holds its reasons.
        NoBackendError: no candidate serves; holds every verdict.
    """
    policy = policy or Policy()
    platform = registry.platform_for(device.vendor)
    candidates = _all_candidates(platform, request, device, policy, registry)
    verdicts = [judge(c, request, device, inventory, registry) for c in candidates]
    named, decided_by = policy.named()
    if named is None:
        named, decided_by = _best(verdicts, policy)
    selection = _assemble(request, device, policy, named, decided_by, verdicts, registry)
    if selection.chosen is None:
        raise _refusal(selection, policy)
    return selection


def _all_candidates(
    platform: Platform,
    request: AttentionRequest,
    device: DeviceFacts,
    policy: Policy,
    registry: BackendRegistry,
) -> list[Candidate]:
    """Return the platform's candidates, third parties' and the one named, best rank first."""
    found = {c.name: c for c in platform.candidates(request, device)}
    for name in registry.third_party_names():
        found.setdefault(name, _third_party(name, registry))
    named, _ = policy.named()
    if named is not None and named not in found:
        registration = registry.get(named)  # raises for a name that nobody provides
        found[named] = Candidate(
            name=named,
            priority=None,
            provenance=f"named; {registration.source} is not offered by platform {platform.name}",
        )
    ranked = sorted(found.values(), key=lambda c: -1 if c.priority is None else c.priority)
    return ranked[::-1]


def _third_party(name: str, registry: BackendRegistry) -> Candidate:
    """Rank a third party's backend by its own `auto_priority`; a broken one has no rank."""
    source = registry.get(name).source
    try:
        priority = registry.load(name).auto_priority
    except AttnError:
        priority = None  # `judge` loads it again and shows why it failed
    return Candidate(name=name, priority=priority, provenance=f"declared by {source}")


def _best(verdicts: Iterable[Verdict], policy: Policy) -> tuple[str | None, DecidedBy]:
    """Return the eligible backend that was measured fastest, else the highest ranked.

    A backend that serves the request only by a slow path ranks after all that need none.
    """
    eligible = {
        v.name: v for v in verdicts if v.status is VerdictStatus.ELIGIBLE and v.priority is not None
    }
    for name in policy.measured:
        if name in eligible:
            return name, DecidedBy.MEASURED
    ranked = sorted(eligible.values(), key=lambda v: (bool(v.slow_features), -(v.priority or 0)))
    return (ranked[0].name if ranked else None), DecidedBy.DEFAULT


def _assemble(
    request: AttentionRequest,
    device: DeviceFacts,
    policy: Policy,
    named: str | None,
    decided_by: DecidedBy,
    verdicts: list[Verdict],
    registry: BackendRegistry,
) -> Selection:
    chosen = next((v for v in verdicts if v.name == named and v.is_choosable), None)
    final = tuple(v.as_chosen() if v is chosen else v for v in verdicts)
    backend: type[AttentionBackend] | None = None
    if chosen is not None:
        backend = registry.load(chosen.name)
    return Selection(
        request=request,
        device=device,
        policy=policy,
        chosen=None if chosen is None else chosen.name,
        backend=backend,
        kv_layout=None if chosen is None else request.kv_layout or chosen.kv_layout,
        block_size=None if chosen is None else chosen.block_size,
        decided_by=decided_by,
        verdicts=final,
        failures=tuple(str(failure) for failure in registry.failures()),
    )


def _refusal(selection: Selection, policy: Policy) -> AttnError:
    """Return the error that says why nothing was chosen."""
    named, decided_by = policy.named()
    place = f"{selection.device.name} ({selection.device.arch})"
    if named is None:
        return NoBackendError(
            f"no backend serves this request on {place}.\n{selection.explain()}",
            selection=selection,
            hint="each line above names the value and what is allowed.",
        )
    verdict = selection.verdict(named)
    words = f"backend {named} ({decided_by}) cannot serve this request on {place}: "
    if verdict.status is VerdictStatus.UNAVAILABLE:
        return VendorMissingError(words + verdict.summary())
    return BackendRejectedError(
        words + verdict.summary(),
        selection=selection,
        hint=_alternatives(selection),
    )


def _alternatives(selection: Selection) -> str:
    others = [v.name for v in selection.verdicts if v.status is VerdictStatus.ELIGIBLE]
    if not others:
        return "no other backend serves it either."
    return f"these would serve it: {', '.join(others)}."


@dataclass(slots=True)
class SelectionCache:
    """Selections by everything that they depend on; the oldest is dropped when it is full."""

    max_entries: int = 1024
    _entries: dict[tuple[Any, ...], Selection] = field(default_factory=dict)

    def select(
        self,
        request: AttentionRequest,
        device: DeviceFacts,
        inventory: Inventory,
        policy: Policy,
        registry: BackendRegistry = DEFAULT_REGISTRY,
    ) -> Selection:
        """As `select`; a refusal is not kept."""
        key = (request, device, inventory, policy, id(registry), registry.generation)
        found = self._entries.get(key)
        if found is None:
            found = select(request, device, inventory, policy, registry=registry)
            while len(self._entries) >= self.max_entries:
                self._entries.pop(next(iter(self._entries)), None)
            self._entries[key] = found
        return found


class Selector:
    """Selection on this machine: knows what is installed, probes what must be known, caches.

    This is where libraries get loaded: `select` itself never does that.
    """

    def __init__(self, registry: BackendRegistry = DEFAULT_REGISTRY) -> None:
        """Start with nothing scanned."""
        self.registry = registry
        self.cache = SelectionCache()
        self._inventories: dict[str, Inventory] = {}

    def current_platform(self) -> Platform:
        """Return the available platform of the lowest precedence number.

        Raises:
            NoBackendError: none is available; gives the reason of each.
        """
        reasons = []
        for platform in self.registry.platforms().values():
            availability = platform.availability()
            if availability.is_available:
                return platform
            reasons.append(f"{platform.name}: {availability.reason}")
        reasons += [str(failure) for failure in self.registry.failures()]
        raise NoBackendError(
            "no platform is available on this machine: " + ("; ".join(reasons) or "none installed"),
            hint="pip install attn-cpu brings the one that every machine can use.",
        )

    def device_facts(self, device: torch.device) -> DeviceFacts:
        """Return the facts of a torch device of this machine.

        Raises:
            NoBackendError: no available platform has such devices; gives the reason of each.
        """
        reasons = []
        for platform in self.registry.platforms().values():
            if platform.torch_device_type == device.type:
                availability = platform.availability()
                if availability.is_available:
                    return platform.device(device.index or 0)
                reasons.append(f"{platform.name}: {availability.reason}")
        raise NoBackendError(
            f"no available platform has a torch device {device}: "
            + ("; ".join(reasons) or f"no installed platform has devices of type {device.type!r}"),
            hint="`attn info` shows platforms and devices.",
        )

    def inventory(self, device: DeviceFacts) -> Inventory:
        """Return what is installed for a device; for a simulated one, everything is assumed."""
        platform = self.registry.platform_for(device.vendor)
        if device.is_simulated:
            return assume_all(platform.vendor_specs())
        if platform.name not in self._inventories:
            self._inventories[platform.name] = scan(platform.vendor_specs())
        return self._inventories[platform.name]

    def resolve(
        self,
        request: AttentionRequest,
        device: DeviceFacts | None = None,
        policy: Policy | None = None,
    ) -> Selection:
        """Select, probing libraries whose build decides and loading the chosen one's.

        If the library of a backend chosen by "auto" fails to load, selection runs again with that
        library known to be broken, and the result shows it.

        Raises:
            AttnError: as `select`; VendorMissingError where a named backend's library fails.
        """
        policy = policy or Policy()
        device = device or self.current_platform().device()
        for _ in range(_MAX_RELOADS):
            inventory = self._probed(request, device, policy)
            selection = self.cache.select(request, device, inventory, policy, self.registry)
            if device.is_simulated or self._load(selection, inventory, policy):
                _LOG.info("%s", selection.one_line())
                return selection
        raise NoBackendError(
            f"every vendor library of the candidates failed to load on {device.name}."
        )

    def _probed(
        self, request: AttentionRequest, device: DeviceFacts, policy: Policy
    ) -> Inventory:
        """Return the inventory with every library probed that a verdict is waiting for."""
        inventory = self.inventory(device)
        if device.is_simulated:
            return inventory
        platform = self.registry.platform_for(device.vendor)
        candidates = _all_candidates(platform, request, device, policy, self.registry)
        wanted: set[str] = set()
        for candidate in candidates:
            wanted.update(judge(candidate, request, device, inventory, self.registry).needs_probe)
        if wanted:
            inventory = probe(platform.vendor_specs(), sorted(wanted), inventory)
            self._inventories[platform.name] = inventory
        return inventory

    def _load(self, selection: Selection, inventory: Inventory, policy: Policy) -> bool:
        """Load the chosen backend's library; False: it is broken, and "auto" may go on."""
        backend = selection.backend
        if backend is None or not backend.vendor_libraries:
            return True
        try:
            backend.load_vendor(selection.device, inventory)
        except VendorMissingError as error:
            if policy.named()[0] is not None:
                raise
            platform = self.registry.platform_for(selection.device.vendor)
            for name in backend.vendor_libraries:
                if inventory.get(name).is_usable:
                    inventory = inventory.with_broken(name, error)
            self._inventories[platform.name] = inventory
            return False
        return True


_MAX_RELOADS = 8  # more broken libraries than any platform has

DEFAULT_SELECTOR = Selector()
"""The selector of this process."""


def current_platform() -> Platform:
    """Return this machine's platform; see `Selector.current_platform`."""
    return DEFAULT_SELECTOR.current_platform()


def get_attn_backend(
    request: AttentionRequest,
    device: DeviceFacts | None = None,
    *,
    backend: str | None = None,
) -> type[AttentionBackend]:
    """Return the backend class for a request, on this machine unless a device is given.

    Args:
        request: what the model asks.
        device: where it runs; None is the current platform's first device.
        backend: the name of the backend to use; None is "auto".

    Raises:
        AttnError: as `select`.
    """
    selection = DEFAULT_SELECTOR.resolve(request, device, Policy(backend=backend))
    return selection.backend_cls


def get_mamba_attn_backend(name: str, *, batch_invariant: bool = False) -> type[Any]:
    """Return the class of a recurrent backend.

    Raises:
        BackendNotProvidedError: the field knows the name, and nothing registered provides it.
        UnknownNameError: nobody knows the name.
        BackendRejectedError: batch-invariant mode, which no recurrent backend has.
    """
    try:
        cls = DEFAULT_REGISTRY.load(str(name), "mamba")
    except BackendNotProvidedError:
        raise
    except UnknownNameError as error:
        raise UnknownNameError(error.message, hint=error.hint) from None
    if batch_invariant:
        raise BackendRejectedError(
            f"backend {name} has no batch-invariant mode; batch_invariant=True is served by "
            "attention backends only."
        )
    return cls
