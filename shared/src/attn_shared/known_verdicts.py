"""What is known of backends that the field has and nothing installed provides, for one request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from attn_shared.capability import Reason
from attn_shared.device import DeviceFacts
from attn_shared.foreign_names import family_of
from attn_shared.known_backends import KNOWN_BACKENDS, KnownBackend
from attn_shared.known_limits import SOURCE, published_limits
from attn_shared.registry import DEFAULT_REGISTRY, BackendRegistry
from attn_shared.request import AttentionRequest

__all__ = ["KNOWN_NOT_PROVIDED", "KnownVerdict", "known_verdict", "known_verdicts"]

KNOWN_NOT_PROVIDED = "known, not provided"
"""The status of all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownVerdict:
    """What a backend that is not provided would say.

    Attributes:
        name: the backend.
        known: its facts.
        reasons: why it would refuse by its published limits; None where none are published.
    """

    name: str
    known: KnownBackend
    reasons: tuple[Reason, ...] | None

    @property
    def would_serve(self) -> bool:
        """Whether its published limits admit the request."""
        return self.reasons == ()

    def summary(self) -> str:
        """Say in one line what it is, and whether it would serve."""
        about = f"{self.known.kernels}; {self.known.plan}"
        if self.reasons is None:
            return about
        if self.would_serve:
            return f"{about}; would serve this by the limits of {SOURCE}"
        refused = "; ".join(str(reason) for reason in self.reasons)
        return f"{about}; would refuse this by the limits of {SOURCE}: {refused}"

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-safe values."""
        reasons = None if self.reasons is None else [reason.to_dict() for reason in self.reasons]
        return {
            "name": self.name,
            "status": KNOWN_NOT_PROVIDED,
            "family": self.known.family,
            "description": self.known.kernels,
            "plan": self.known.plan,
            "limits_of": None if self.reasons is None else SOURCE,
            "would_serve": None if self.reasons is None else self.would_serve,
            "reasons": reasons,
        }


def known_verdict(
    name: str, known: KnownBackend, request: AttentionRequest, device: DeviceFacts
) -> KnownVerdict:
    """Return what one known backend would say."""
    limits = published_limits(name, device)
    reasons = None if limits is None else limits.check(request, device)
    return KnownVerdict(name=name, known=known, reasons=reasons)


def known_verdicts(
    request: AttentionRequest,
    device: DeviceFacts,
    registry: BackendRegistry = DEFAULT_REGISTRY,
) -> tuple[KnownVerdict, ...]:
    """Return the known backends of the request's family for the device's vendor.

    Those that something installed provides are left out: they have verdicts of their own.
    """
    family, provided = family_of(request), frozenset(registry.names())
    return tuple(
        known_verdict(name, known, request, device)
        for name, known in KNOWN_BACKENDS.items()
        if known.family == family and device.vendor in known.vendors and name not in provided
    )
