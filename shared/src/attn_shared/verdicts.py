"""Who may run a request, and the verdict on each: loaded, available, capable, or why not."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from attn_shared._plugins import BackendKind
from attn_shared.backend import AttentionBackend
from attn_shared.capability import Capability
from attn_shared.device import DeviceFacts
from attn_shared.errors import AttnError, own_words
from attn_shared.inventory import Inventory, VendorStatus
from attn_shared.kernel_paths import KernelPath
from attn_shared.mla_prefill import MLAPrefill
from attn_shared.platform import Candidate, Platform
from attn_shared.registry import BackendRegistry
from attn_shared.request import AttentionRequest
from attn_shared.selection import Policy, Verdict, VerdictStatus

__all__ = ["candidates_for", "entry_name", "judge"]


def candidates_for(
    platform: Platform,
    request: AttentionRequest,
    device: DeviceFacts,
    policy: Policy,
    registry: BackendRegistry,
    kind: BackendKind = "attention",
) -> list[Candidate]:
    """Return the platform's candidates, third parties' and the one named, best rank first.

    Raises:
        UnknownNameError: a backend was named that nobody provides.
    """
    is_prefill = kind == "mla_prefill"
    offered = platform.mla_prefills if is_prefill else platform.candidates
    found = {c.name: _as_registered(c, registry, kind) for c in offered(request, device)}
    for name in registry.third_party_names(kind):
        if name not in found:
            found[name] = _third_party(name, registry, kind)
    named, _ = policy.named()
    if named is not None and named not in found:
        source = registry.get(named, kind).source
        found[named] = Candidate(
            name=named,
            priority=None,
            provenance=f"of {source}, which platform {platform.name} does not rank",
        )
    return sorted(found.values(), key=_order)


def _order(candidate: Candidate) -> tuple[bool, int]:
    """Highest priority first, then those without one; equals stay in the platform's order."""
    return (candidate.priority is None, -(candidate.priority or 0))


def _as_registered(candidate: Candidate, registry: BackendRegistry, kind: BackendKind) -> Candidate:
    """Say so where this process put another class in the place of the ranked one."""
    if not registry.is_overridden(candidate.name, kind):
        return candidate
    path = registry.get(candidate.name, kind).path
    return replace(candidate, provenance=f"{candidate.provenance}; overridden by {path}")


def _third_party(name: str, registry: BackendRegistry, kind: BackendKind) -> Candidate:
    """Rank a third party's backend by its own `auto_priority`; a broken one has no rank."""
    try:
        source, priority = registry.get(name, kind).source, registry.load(name, kind).auto_priority
    except AttnError:
        return Candidate(name=name, priority=None, provenance="")  # `judge` meets and shows it
    return Candidate(name=name, priority=priority, provenance=f"declared by {source}")


def judge(
    candidate: Candidate,
    request: AttentionRequest,
    device: DeviceFacts,
    inventory: Inventory,
    registry: BackendRegistry,
    kind: BackendKind = "attention",
    *,
    prefer: Collection[str] = (),
) -> Verdict:
    """Return the verdict on one candidate; whatever is wrong with it stays its own affair.

    A device that it does not run on is said before a library that is missing: installing that one
    would not help.

    Args:
        candidate: who is judged.
        request: what is asked.
        device: where it would run.
        inventory: what is installed there.
        registry: where its class is found.
        kind: what sort of backend the candidate is.
        prefer: libraries that the policy prefers.
    """
    try:
        backend: type[AttentionBackend] | type[MLAPrefill] = registry.load(candidate.name, kind)
    except AttnError as error:
        return _unavailable(candidate, error.message)
    missing = _missing_libraries(backend, inventory)
    # A third party's capability may raise anything; it must not take selection down with it.
    try:
        capability = backend.capability(device, inventory)
        if missing and capability.admits(device):
            return _unavailable(candidate, missing)
        verdict = _judge_capability(candidate, backend, capability, request, device, inventory)
    except Exception as error:  # noqa: BLE001
        return _unavailable(candidate, missing or f"its capability raised {own_words(error)}")
    preferred = [name for name in backend.vendor_libraries if name in prefer]
    return replace(verdict, is_preferred=any(inventory.get(name).is_usable for name in preferred))


def entry_name(backend: type[AttentionBackend] | type[MLAPrefill]) -> str:
    """Return the name under which an inventory keeps that a backend itself is broken."""
    return f"mla_prefill {backend.name}" if issubclass(backend, MLAPrefill) else backend.name


def _missing_libraries(
    backend: type[AttentionBackend] | type[MLAPrefill], inventory: Inventory
) -> str:
    """Say what is wrong with the backend itself or all of its libraries, or ""."""
    itself = inventory.get(entry_name(backend))
    if itself.status is VendorStatus.BROKEN:
        return itself.describe()
    entries = [inventory.get(name) for name in backend.vendor_libraries]
    if not entries or any(entry.is_usable for entry in entries):
        return ""
    return "; ".join(entry.describe() for entry in entries)


def _judge_capability(
    candidate: Candidate,
    backend: type[AttentionBackend] | type[MLAPrefill],
    capability: Capability,
    request: AttentionRequest,
    device: DeviceFacts,
    inventory: Inventory,
) -> Verdict:
    verdict = Verdict(
        name=candidate.name,
        status=VerdictStatus.ELIGIBLE,
        priority=candidate.priority,
        provenance=candidate.provenance,
    )
    reasons = capability.check(request, device)
    if reasons:
        return replace(verdict, status=VerdictStatus.REJECTED, reasons=reasons)
    verdict = replace(
        verdict,
        slow_features=capability.slow_features(request),
        kv_layout=capability.layout_for(request),
        block_size=None if request.is_cache_free else capability.block_size_for(request.block_size),
    )
    waiting = tuple(
        name
        for name in capability.needs_probe
        if inventory.get(name).status is VendorStatus.PRESENT
    )
    if not waiting:
        return replace(verdict, paths=_paths(backend, verdict, request, device, inventory))
    detail = (
        f"not known before {' and '.join(waiting)} {'is' if len(waiting) == 1 else 'are'} probed"
    )
    return replace(verdict, status=VerdictStatus.UNKNOWN, detail=detail, needs_probe=waiting)


def _paths(
    backend: type[AttentionBackend] | type[MLAPrefill],
    verdict: Verdict,
    request: AttentionRequest,
    device: DeviceFacts,
    inventory: Inventory,
) -> tuple[KernelPath, ...]:
    """Return what the backend says of its kernels; a failure to say so leaves it eligible."""
    if verdict.block_size is not None:
        request = request.with_options(block_size=verdict.block_size)
    try:
        return backend.kernel_paths(request, device, inventory)
    except Exception as error:  # noqa: BLE001 - a third party's may raise anything
        words = f"kernel_paths of {backend.name} raised {own_words(error)}"
        return (KernelPath(rows="any rows", kernel="not known", why=words),)


def _unavailable(candidate: Candidate, detail: str) -> Verdict:
    return Verdict(
        name=candidate.name,
        status=VerdictStatus.UNAVAILABLE,
        priority=candidate.priority,
        provenance=candidate.provenance,
        detail=detail,
    )
