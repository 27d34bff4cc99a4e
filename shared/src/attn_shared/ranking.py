"""Default orders of backends as tables: what a platform offers for a request, and why so ranked."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from attn_shared.device import DeviceFacts, Vendor
from attn_shared.errors import InvalidInputError
from attn_shared.platform import Candidate
from attn_shared.request import AttentionRequest, Phase

__all__ = ["Rank", "check_vendor", "rank"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """One row of a platform's table: where a backend stands on some devices, in some phases.

    Attributes:
        name: the backend's registered name.
        priority: the higher, the earlier "auto" takes it; None: by name only.
        provenance: where the rank comes from: a measurement with its machine, or a rule.
        families: families of `DeviceFacts.arch_family` that the row is for; None is all.
        archs: canonical names of architectures that the row is for; None is all.
        phases: parts of serving that the row is for; None is all.
        fits: whether the row is for a request, where that is more than its phase: a backend whose
            fast path serves some shapes alone stands elsewhere for the others. None is all.
    """

    name: str
    priority: int | None
    provenance: str
    families: frozenset[str] | None = None
    archs: frozenset[str] | None = None
    phases: frozenset[Phase] | None = None
    fits: Callable[[AttentionRequest], bool] | None = None

    def applies(self, request: AttentionRequest, device: DeviceFacts) -> bool:
        """Whether the row is for this device, phase and request."""
        return (
            (self.families is None or device.arch_family in self.families)
            and (self.archs is None or device.arch in self.archs)
            and (self.phases is None or request.phase in self.phases)
            and (self.fits is None or self.fits(request))
        )


def rank(
    table: Iterable[Rank], request: AttentionRequest, device: DeviceFacts
) -> tuple[Candidate, ...]:
    """Return a candidate for each backend of the table, best rank first.

    A backend may have several rows, the special ones first: the first that applies counts.
    """
    found: dict[str, Candidate] = {}
    for row in table:
        if row.name not in found and row.applies(request, device):
            found[row.name] = Candidate(
                name=row.name, priority=row.priority, provenance=row.provenance
            )
    return tuple(sorted(found.values(), key=_order))


def _order(candidate: Candidate) -> tuple[bool, int]:
    return (candidate.priority is None, -(candidate.priority or 0))


def check_vendor(device: DeviceFacts, vendor: Vendor) -> None:
    """Refuse a device of another vendor.

    Raises:
        InvalidInputError: names the device, its vendor and the one allowed.
    """
    if device.vendor is not vendor:
        raise InvalidInputError.for_argument(
            "device",
            f"{device.name} of vendor {device.vendor}",
            f"a device of vendor {vendor}",
            hint=f"ask the platform of {device.vendor}.",
        )
