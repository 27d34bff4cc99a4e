"""The choice of a backend: a pure function of what is asked, what is there and who named what."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from attn_shared._plugins import BackendKind
from attn_shared.argument_checks import require_kind
from attn_shared.device import DeviceFacts
from attn_shared.errors import (
    AttnError,
    BackendRejectedError,
    InvalidInputError,
    NoBackendError,
    VendorMissingError,
)
from attn_shared.inventory import Inventory
from attn_shared.registry import DEFAULT_REGISTRY, BackendRegistry
from attn_shared.request import AttentionRequest
from attn_shared.selection import DecidedBy, Policy, Selection, Verdict, VerdictStatus, best_of
from attn_shared.verdicts import candidates_for, judge

__all__ = ["SelectionCache", "check_asked", "contender", "select"]


def select(
    request: AttentionRequest,
    device: DeviceFacts,
    inventory: Inventory,
    policy: Policy | None = None,
    *,
    registry: BackendRegistry = DEFAULT_REGISTRY,
    kind: BackendKind = "attention",
) -> Selection:
    """Choose the backend for a request on a device.

    Pure: reads no environment, imports no vendor library, mutates nothing. Precedence: what the
    model requires, then what the user named, then the libraries that the user prefers, then what
    was measured on this very device, then the platform's default order. A named backend serves or
    raises; only "auto" goes on to others.

    Args:
        request: what the model asks.
        device: where it runs, here or elsewhere.
        inventory: which vendor libraries are installed there.
        policy: who named what; None is "auto".
        registry: where names are looked up.
        kind: "attention", or "mla_prefill" for what prefills over latents.

    Raises:
        InvalidInputError: an argument is of another class.
        UnknownNameError: a backend was named that nobody knows or provides, or a library preferred
            or avoided that is none of the platform's.
        PlatformMissingError: no installed package serves the device's vendor.
        BackendRejectedError: the named backend cannot serve; holds its reasons.
        VendorMissingError: the named backend, or all of its libraries, cannot be loaded.
        NoBackendError: no candidate serves; holds every verdict.
    """
    policy = Policy() if policy is None else policy
    check_asked(request, device, policy)
    require_kind("inventory", inventory, Inventory)
    verdicts = _verdicts(request, device, inventory, policy, registry, kind)
    chosen, decided_by = _best(verdicts, policy, {VerdictStatus.ELIGIBLE})
    selection = Selection(
        request=request,
        device=device,
        policy=policy,
        chosen=None if chosen is None else chosen.name,
        backend=None if chosen is None else registry.load(chosen.name, kind),
        kv_layout=None if chosen is None else chosen.kv_layout,
        block_size=None if chosen is None else chosen.block_size,
        decided_by=decided_by,
        verdicts=tuple(v.as_chosen() if v is chosen else v for v in verdicts),
        failures=tuple(str(failure) for failure in registry.failures()),
        kind=kind,
    )
    if chosen is None:
        raise _refusal(selection)
    return selection


def check_asked(request: object, device: object, policy: object) -> None:
    """Refuse what is no request, device or policy, before a field of it is looked at.

    Raises:
        InvalidInputError: names the argument, what it is and what is allowed.
    """
    require_kind("request", request, AttentionRequest)
    require_kind("policy", policy, Policy)
    if not isinstance(device, DeviceFacts):
        raise InvalidInputError.for_argument(
            "device",
            repr(device),
            "a DeviceFacts",
            hint="resolve_device(name) returns that of a preset or an architecture.",
        )


def _verdicts(
    request: AttentionRequest,
    device: DeviceFacts,
    inventory: Inventory,
    policy: Policy,
    registry: BackendRegistry,
    kind: BackendKind,
) -> list[Verdict]:
    platform = registry.platform_for(device.vendor)
    candidates = candidates_for(platform, request, device, policy, registry, kind)
    prefer = inventory.require_known(policy.prefer)
    seen = inventory.without(policy.avoid)
    return [judge(c, request, device, seen, registry, kind, prefer=prefer) for c in candidates]


def contender(
    request: AttentionRequest,
    device: DeviceFacts,
    inventory: Inventory,
    policy: Policy,
    registry: BackendRegistry,
    kind: BackendKind = "attention",
) -> Verdict | None:
    """Return the verdict to choose if all that is unknown turned out well; None if there is none.

    If it is unknown itself, its `needs_probe` are what the choice waits for.
    """
    verdicts = _verdicts(request, device, inventory, policy, registry, kind)
    return _best(verdicts, policy, {VerdictStatus.ELIGIBLE, VerdictStatus.UNKNOWN})[0]


def _best(
    verdicts: Iterable[Verdict], policy: Policy, statuses: set[VerdictStatus]
) -> tuple[Verdict | None, DecidedBy]:
    """Return the verdict to choose among those of some statuses, and who decides so.

    The one that is named, else the one measured fastest, else the highest ranked. A backend that
    serves the request only by a slow path ranks after all that need none.
    """
    usable = [verdict for verdict in verdicts if verdict.status in statuses]
    named, decided_by = policy.named()
    if named is not None:
        return next((v for v in usable if v.name == named), None), decided_by
    return best_of(usable, policy.measured)


def _refusal(selection: Selection) -> AttnError:
    """Return the error that says why nothing was chosen."""
    place = f"{selection.device.name} ({selection.device.arch})"
    named, decided_by = selection.policy.named()
    if named is None:
        return NoBackendError(
            f"no backend serves this request on {place}:\n{selection.table()}\n",
            selection=selection,
            hint="each line of a rejected one names the value and what is allowed.",
        )
    verdict = selection.verdict(named)
    who = "the model requires" if decided_by is DecidedBy.MODEL else "was named"
    words = (
        f"backend {named}, which {who}, cannot serve this request on {place}: {verdict.summary()}."
    )
    if verdict.status is VerdictStatus.UNAVAILABLE:
        return VendorMissingError(words, selection=selection, hint=_alternatives(selection))
    if verdict.status is VerdictStatus.UNKNOWN:
        hint = "Selector.resolve probes what a selection waits for."
        return BackendRejectedError(words, selection=selection, hint=hint)
    return BackendRejectedError(words, selection=selection, hint=_alternatives(selection))


def _alternatives(selection: Selection) -> str:
    others = [v.name for v in selection.verdicts if v.status is VerdictStatus.ELIGIBLE]
    if not others:
        return "no other backend serves it either."
    return f"{', '.join(others)} would serve it."


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
        found = self.find(request, device, inventory, policy, registry)
        if found is None:
            found = select(request, device, inventory, policy, registry=registry)
            self.keep(found, inventory, registry)
        return found

    def find(
        self,
        request: AttentionRequest,
        device: DeviceFacts,
        inventory: Inventory,
        policy: Policy,
        registry: BackendRegistry,
        kind: BackendKind = "attention",
    ) -> Selection | None:
        """Return the selection that was kept for the same question, or None."""
        key = (request, device, inventory, policy, kind, registry, registry.generation)
        return self._entries.get(key)

    def keep(self, selection: Selection, inventory: Inventory, registry: BackendRegistry) -> None:
        """Keep a selection that was made with this inventory and registry."""
        while len(self._entries) >= self.max_entries:
            self._entries.pop(next(iter(self._entries)), None)
        asked = (selection.request, selection.device, inventory, selection.policy, selection.kind)
        self._entries[*asked, registry, registry.generation] = selection
