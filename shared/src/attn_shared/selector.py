"""Selection on this machine: libraries are scanned, probed and loaded as the choice needs them."""

from __future__ import annotations

import logging
from typing import Any

import torch

from attn_shared._plugins import BackendKind
from attn_shared.backend import AttentionBackend
from attn_shared.choice import SelectionCache, check_asked, contender, select
from attn_shared.device import DeviceFacts
from attn_shared.errors import (
    AttnError,
    BackendRejectedError,
    NoBackendError,
    VendorMissingError,
)
from attn_shared.inventory import Inventory, VendorSpec, assume_all, probe, scan
from attn_shared.platform import Platform
from attn_shared.registry import DEFAULT_REGISTRY, BackendRegistry
from attn_shared.request import AttentionRequest
from attn_shared.selection import Policy, Selection
from attn_shared.verdicts import entry_name

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


class Selector:
    """Selection on this machine: knows what is installed, probes what must be known, caches.

    This is where libraries get loaded: `select` itself never does that.
    """

    def __init__(self, registry: BackendRegistry = DEFAULT_REGISTRY) -> None:
        """Start with nothing scanned."""
        self.registry = registry
        self.cache = SelectionCache()
        self._default_device: DeviceFacts | None = None
        # By platform, backends that were named: their own libraries are looked for as well.
        self._named: dict[str, set[tuple[BackendKind, str]]] = {}
        # (platform, is simulated) -> what is known, and the registry's generation then.
        self._inventories: dict[tuple[str, bool], tuple[Inventory, int]] = {}

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
            f"no platform is available on this machine: {'; '.join(reasons) or 'none installed'}.",
            hint="attn-cpu has the one that every machine can use; in a checkout of attn: "
            "pip install ./platforms/cpu",
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
        words = "; ".join(reasons) or f"no installed platform has devices of type {device.type!r}"
        raise NoBackendError(
            f"no available platform has a torch device {device}: {words}.",
            hint="`attn info` shows platforms and devices.",
        )

    def vendor_specs(self, device: DeviceFacts) -> tuple[VendorSpec, ...]:
        """Return how to find the libraries for a device: its platform's, then backends' own.

        Those are third parties', and those that were named on a platform that does not know them.
        """
        platform = self.registry.platform_for(device.vendor)
        specs = {s.name: s for s in platform.vendor_specs()}
        kinds: tuple[BackendKind, ...] = ("attention", "mla_prefill")
        names = [(kind, name) for kind in kinds for name in self.registry.third_party_names(kind)]
        for kind, name in (*names, *sorted(self._named.get(platform.name, ()))):
            try:
                own = self.registry.load(name, kind).vendor_specs
            except AttnError:
                continue  # its verdict says so
            for spec in own:
                specs.setdefault(spec.name, spec)
        return tuple(specs.values())

    def inventory(self, device: DeviceFacts) -> Inventory:
        """Return what is known to be installed for a device; for a simulated one, everything is.

        Libraries are looked for again only where a backend was registered since.
        """
        key = self._inventory_key(device)
        known, generation = self._inventories.get(key, (Inventory(), -1))
        if generation != self.registry.generation:
            names = {entry.name for entry in known.entries}
            new = [spec for spec in self.vendor_specs(device) if spec.name not in names]
            look = assume_all if device.is_simulated else scan
            known = Inventory((*known.entries, *look(new).entries)) if new else known
            self._remember(device, known)
        return known

    def _inventory_key(self, device: DeviceFacts) -> tuple[str, bool]:
        return (self.registry.platform_for(device.vendor).name, device.is_simulated)

    def _remember(self, device: DeviceFacts, inventory: Inventory) -> None:
        self._inventories[self._inventory_key(device)] = (inventory, self.registry.generation)

    def resolve(
        self,
        request: AttentionRequest,
        device: DeviceFacts | None = None,
        policy: Policy | None = None,
        *,
        kind: BackendKind = "attention",
    ) -> Selection:
        """Select, probing libraries whose build decides and loading the chosen one's.

        If what a chosen backend needs fails to load, selection runs again with that known to be
        broken: "auto" goes on and the result shows it, a named backend raises.

        Args:
            request: what the model asks.
            device: where it runs; None is the current platform's first device.
            policy: who named what; None is "auto".
            kind: as in `select`.

        Raises:
            AttnError: as `select`.
        """
        policy = Policy() if policy is None else policy
        device = self._first_device() if device is None else device
        check_asked(request, device, policy)
        self._look_for(policy.named()[0], kind, device)
        known = self.inventory(device)
        found = self.cache.find(request, device, known, policy, self.registry, kind)
        if found is None:
            found = self._resolve(request, device, policy, kind)
            _LOG.info("%s", found.one_line())
        return found

    def _look_for(self, named: str | None, kind: BackendKind, device: DeviceFacts) -> None:
        """See to it that the own libraries of a backend that was named are in the inventory."""
        platform = self.registry.platform_for(device.vendor).name
        names = self._named.setdefault(platform, set())
        if named is None or (kind, named) in names:
            return
        names.add((kind, named))
        for key, (known, _) in list(self._inventories.items()):
            if key[0] == platform:
                self._inventories[key] = (known, -1)

    def _first_device(self) -> DeviceFacts:
        if self._default_device is None:
            self._default_device = self.current_platform().device()
        return self._default_device

    def _resolve(
        self, request: AttentionRequest, device: DeviceFacts, policy: Policy, kind: BackendKind
    ) -> Selection:
        # Ends: each further round knows one more library or backend to be broken.
        failure: BaseException | None = None
        while True:
            inventory = self._probed(request, device, policy, kind)
            try:
                selection = select(
                    request, device, inventory, policy, registry=self.registry, kind=kind
                )
            except AttnError as refusal:
                raise refusal from failure
            seen = inventory.without(policy.avoid)
            failure = None if device.is_simulated else _load_failure(selection, seen)
            if failure is None:
                self.cache.keep(selection, inventory, self.registry)
                return selection
            broken = _what_broke(failure, selection.backend_cls, seen)
            self._remember(device, inventory.with_broken(broken, failure))

    def _probed(
        self, request: AttentionRequest, device: DeviceFacts, policy: Policy, kind: BackendKind
    ) -> Inventory:
        """Return the inventory, with the libraries probed that the choice waits for.

        No more than those: a probe imports a library, which may take seconds.
        """
        while True:
            inventory = self.inventory(device)
            best = contender(request, device, inventory, policy, self.registry, kind)
            if best is None or not best.needs_probe:
                return inventory
            specs = self.vendor_specs(device)
            self._remember(device, probe(specs, best.needs_probe, inventory))


def _load_failure(selection: Selection, inventory: Inventory) -> BaseException | None:
    """Load what the chosen backend needs, and return what went wrong."""
    # A vendor's import may raise anything; each one means that this backend cannot run.
    try:
        selection.backend_cls.load_vendor(selection.device, inventory)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001
        return error
    return None


def _what_broke(failure: BaseException, backend: type[Any], inventory: Inventory) -> str:
    """Return the library to blame, or the backend itself where that cannot be told."""
    usable = [name for name in backend.vendor_libraries if inventory.get(name).is_usable]
    named = failure.library if isinstance(failure, VendorMissingError) else None
    if named in usable:
        return str(named)
    return usable[0] if len(usable) == 1 else entry_name(backend)


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
        backend: the name of the backend to use; None or "auto" leaves the choice.

    Raises:
        AttnError: as `select`.
    """
    return DEFAULT_SELECTOR.resolve(request, device, Policy(backend=backend)).backend_cls


def get_mamba_attn_backend(name: str, *, batch_invariant: bool = False) -> type[Any]:
    """Return the class of a recurrent backend.

    Raises:
        BackendNotProvidedError: the field knows the name, and nothing registered provides it.
        UnknownNameError: nobody knows the name.
        BackendRejectedError: batch-invariant mode, which no recurrent backend has.
    """
    if batch_invariant:
        raise BackendRejectedError(
            f"batch_invariant=True is not allowed with the recurrent backend {name}; allowed: "
            "False.",
            hint="only attention backends have a batch-invariant mode.",
        )
    cls: type[Any] = DEFAULT_REGISTRY.load(str(name), "mamba")
    return cls
