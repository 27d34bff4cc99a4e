"""The verdict on one candidate: loaded, available, capable, or why not."""

from __future__ import annotations

from attn_shared.backend import AttentionBackend
from attn_shared.device import DeviceFacts
from attn_shared.errors import AttnError
from attn_shared.inventory import Inventory
from attn_shared.platform import Candidate
from attn_shared.registry import BackendRegistry
from attn_shared.request import AttentionRequest
from attn_shared.selection import Verdict, VerdictStatus

__all__ = ["judge"]


def judge(
    candidate: Candidate,
    request: AttentionRequest,
    device: DeviceFacts,
    inventory: Inventory,
    registry: BackendRegistry,
) -> Verdict:
    """Return the verdict on one candidate; whatever is wrong with it stays its own affair."""
    try:
        backend: type[AttentionBackend] = registry.load(candidate.name)
    except AttnError as error:
        return _unavailable(candidate, error.message)
    missing = _missing_libraries(backend, inventory)
    if missing:
        return _unavailable(candidate, missing)
    # A third party's capability may raise anything; it must not take selection down with it.
    try:
        return _judge_capability(candidate, backend, request, device, inventory)
    except Exception as error:
        return _unavailable(
            candidate, f"its capability raised {type(error).__name__}: {error}"
        )


def _missing_libraries(backend: type[AttentionBackend], inventory: Inventory) -> str:
    """Say what is wrong with all of a backend's libraries, or "" if one is usable."""
    entries = [inventory.get(name) for name in backend.vendor_libraries]
    if not entries or any(entry.is_usable for entry in entries):
        return ""
    return "; ".join(entry.describe() for entry in entries)


def _judge_capability(
    candidate: Candidate,
    backend: type[AttentionBackend],
    request: AttentionRequest,
    device: DeviceFacts,
    inventory: Inventory,
) -> Verdict:
    capability = backend.capability(device, inventory)
    reasons = capability.check(request, device)
    status, detail = VerdictStatus.ELIGIBLE, ""
    if capability.needs_probe:
        status = VerdictStatus.UNKNOWN
        detail = f"needs a probe of {', '.join(capability.needs_probe)}"
    if reasons:
        status = VerdictStatus.REJECTED
    return Verdict(
        name=candidate.name,
        status=status,
        priority=candidate.priority,
        provenance=candidate.provenance,
        reasons=reasons,
        detail=detail if not reasons else "",
        slow_features=capability.slow_features(request),
        needs_probe=capability.needs_probe if not reasons else (),
        kv_layout=capability.kv_layouts[0],
        block_size=None
        if request.is_cache_free
        else capability.block_size_for(request.block_size),
    )


def _unavailable(candidate: Candidate, detail: str) -> Verdict:
    return Verdict(
        name=candidate.name,
        status=VerdictStatus.UNAVAILABLE,
        priority=candidate.priority,
        provenance=candidate.provenance,
        detail=detail,
    )
