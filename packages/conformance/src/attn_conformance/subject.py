"""What is put to the test: one backend on one device, with what is installed."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from attn_conformance.batch import Batch, make_batch
from attn_conformance.case import Case
from attn_conformance.engine import Engine
from attn_shared.backend import AttentionBackend
from attn_shared.capability import Capability, Reason, Support
from attn_shared.device import DeviceFacts
from attn_shared.errors import PluginError, UnknownNameError
from attn_shared.inventory import Inventory, probe, scan
from attn_shared.selector import DEFAULT_SELECTOR, Selector
from attn_shared.spec import BuildConfig

__all__ = ["Subject"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A backend, ready to be run.

    Attributes:
        name: as it was asked for: a registered name, or "module:Class".
        source: the distribution with its version, or the module.
        backend: the class.
        device: where it runs.
        facts: what that device is.
        inventory: what is installed for it.
    """

    name: str
    source: str
    backend: type[AttentionBackend]
    device: torch.device
    facts: DeviceFacts
    inventory: Inventory

    @classmethod
    def find(
        cls, name: str, device: str = "cpu", *, selector: Selector = DEFAULT_SELECTOR
    ) -> Subject:
        """Load a backend by name and what its capability depends on.

        Args:
            name: a registered name, or "module:Class" of a class that is not registered.
            device: a torch device of this machine.
            selector: who knows names and devices.

        Raises:
            AttnError: the name or the device is unknown, the class or its library does not load.
        """
        place = _place(device)
        facts = selector.device_facts(place)
        if place.type != "cpu":
            place = torch.device(place.type, facts.index or 0)  # as tensors name it
        backend, source = _load(name, selector)
        inventory = _probed(backend, facts, selector)
        if backend.vendor_libraries:
            backend.load_vendor(facts, inventory)
        return cls(
            name=name,
            source=source,
            backend=backend,
            device=place,
            facts=facts,
            inventory=inventory,
        )

    @property
    def capability(self) -> Capability:
        """What the backend says that it can do here."""
        return _capability(self.backend, self.facts, self.inventory)

    def excluded(self, case: Case) -> tuple[Reason, ...]:
        """Return the capability's reasons not to run a case; empty: it must be right."""
        return self.capability.check(case.request, self.facts)

    def batch(self, case: Case) -> Batch:
        """Make the tensors of a case on the subject's device."""
        flavour = self.facts.fp8_dtype or torch.float8_e4m3fn
        return make_batch(case, self.device, fp8_e4m3_dtype=flavour)

    def engine(self, batch: Batch, **config: Any) -> Engine:
        """Build implementation and builder for a batch's layer.

        Args:
            batch: whose layer it is.
            config: fields of `BuildConfig`.
        """
        options = {"batch_invariant": batch.case.batch_invariant, **config}
        return Engine.of(self.backend, batch, BuildConfig(**options))

    def returns_lse_of(self, case: Case) -> bool:
        """Whether it says that it returns the LSE of such a case."""
        request = case.request.with_options(needs_lse=True)
        return self.returns_lse and not self.capability.check(request, self.facts)

    @property
    def returns_lse(self) -> bool:
        """Whether the backend says that it returns the LSE."""
        return self.capability.lse is not Support.NO


@lru_cache(maxsize=8)
def _capability(
    backend: type[AttentionBackend], facts: DeviceFacts, inventory: Inventory
) -> Capability:
    return backend.capability(facts, inventory)


def _place(device: str) -> torch.device:
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise UnknownNameError(
            f"unknown device {device!r}; allowed: a torch device such as cpu or cuda:0."
        ) from error


def _load(name: str, selector: Selector) -> tuple[type[AttentionBackend], str]:
    if ":" not in name:
        registry = selector.registry
        return registry.load(name), registry.get(name).source
    module, _, qualname = name.partition(":")
    try:
        target: Any = importlib.import_module(module)
        for part in qualname.split("."):
            target = getattr(target, part)
    except (ImportError, AttributeError) as error:
        raise PluginError(f"{name} cannot be imported: {error}") from error
    if not (isinstance(target, type) and issubclass(target, AttentionBackend)):
        raise PluginError(f"{name} is not a subclass of attn_shared.backend.AttentionBackend.")
    return target, module


def _probed(backend: type[AttentionBackend], facts: DeviceFacts, selector: Selector) -> Inventory:
    """Return what is installed, each library probed that the capability waits for."""
    inventory = selector.inventory(facts)
    names = {entry.name for entry in inventory.entries}
    own = [spec for spec in backend.vendor_specs if spec.name not in names]
    if own:
        inventory = Inventory((*inventory.entries, *scan(own).entries))
    wanted = backend.capability(facts, inventory).needs_probe
    return probe([*selector.vendor_specs(facts), *own], wanted, inventory)
