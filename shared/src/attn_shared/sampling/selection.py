"""The choice of a sampler, with a verdict on every candidate, as attention's selection has it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from attn_shared.device import DeviceFacts
from attn_shared.errors import (
    AttnError,
    BackendRejectedError,
    NoBackendError,
    UnknownNameError,
    VendorMissingError,
)
from attn_shared.inventory import Inventory
from attn_shared.sampling.backend import SamplerBackend
from attn_shared.sampling.request import SamplerRequest
from attn_shared.selection import DecidedBy, Policy, Verdict, VerdictStatus, best_of

__all__ = ["SamplerSelection", "select_sampler"]

SCHEMA_VERSION = 1
"""Version of `SamplerSelection.to_dict`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerSelection:
    """Which sampler serves a kind of call on a device, and why.

    Attributes:
        request, device, policy: what was asked.
        chosen: the sampler's name; None only inside an error.
        sampler: its class.
        decided_by: who decided.
        verdicts: one per candidate, best rank first.
    """

    request: SamplerRequest
    device: DeviceFacts
    policy: Policy
    chosen: str | None
    sampler: type[SamplerBackend] | None = field(repr=False)
    decided_by: DecidedBy
    verdicts: tuple[Verdict, ...]

    def verdict(self, name: str) -> Verdict:
        """Return the verdict on one candidate.

        Raises:
            UnknownNameError: it was none.
        """
        for verdict in self.verdicts:
            if verdict.name == name:
                return verdict
        raise UnknownNameError.for_name("sampler", name, (v.name for v in self.verdicts))

    def one_line(self) -> str:
        """Say what was chosen, by whom, and what was not."""
        rest = [
            f"{v.name} {v.status}: {v.summary()}"
            for v in self.verdicts
            if v.status in (VerdictStatus.REJECTED, VerdictStatus.UNAVAILABLE)
        ]
        head = f"{self.chosen} chosen by {self.decided_by} for {self.device.name}"
        return "; ".join([head, *rest])

    def notes(self) -> tuple[str, ...]:
        """Return what a reader must know beside the verdicts."""
        notes = []
        if self.device.is_simulated:
            notes.append(
                f"{self.device.name} is simulated: every library is assumed installed, and nothing "
                "is run to give this answer."
            )
        if self.decided_by is DecidedBy.USER:
            notes.append(f"{self.policy.backend} was named by {self.policy.source}")
        return (*notes, *self.policy.remarks)

    def __str__(self) -> str:
        """Read as what was chosen, a line per candidate, and the notes."""
        width = max((len(verdict.name) for verdict in self.verdicts), default=0)
        head = f"{self.chosen or 'nothing'} chosen by {self.decided_by} for {self.device.name}"
        lines = [head]
        lines += [f"{v.name:<{width}}  {v.status:<11}  {v.summary()}" for v in self.verdicts]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes())])

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-safe values with a schema version."""
        return {
            "schema_version": SCHEMA_VERSION,
            "request": self.request.to_dict(),
            "device": self.device.to_dict(),
            "chosen": self.chosen,
            "decided_by": str(self.decided_by),
            "verdicts": [verdict.to_dict() for verdict in self.verdicts],
            "notes": list(self.notes()),
        }


def select_sampler(
    request: SamplerRequest,
    device: DeviceFacts,
    inventory: Inventory,
    candidates: Iterable[type[SamplerBackend]],
    policy: Policy | None = None,
    failures: Mapping[str, str] | None = None,
) -> SamplerSelection:
    """Choose the sampler for a kind of call on a device.

    Pure. A named sampler serves or raises; only "auto" goes on to others.

    Args:
        request: what is asked.
        device: where the logits are.
        inventory: which libraries are installed there.
        candidates: who may serve.
        policy: who named what; None is "auto".
        failures: candidates that could not even be imported, by name, in their own words.

    Raises:
        UnknownNameError: a sampler was named that is no candidate.
        BackendRejectedError: the named one cannot serve such a call; holds its reasons.
        VendorMissingError: the named one's library is absent or broken.
        NoBackendError: no candidate serves.
    """
    policy = policy or Policy()
    classes = {candidate.name: candidate for candidate in candidates}
    verdicts = [_judge(each, request, device, inventory) for each in classes.values()]
    verdicts += [_unavailable(name, words) for name, words in (failures or {}).items()]
    verdicts.sort(key=lambda v: (v.priority is None, -(v.priority or 0)))
    usable = [v for v in verdicts if v.status is VerdictStatus.ELIGIBLE]
    named, decided_by = policy.named()
    if named is None:
        best, decided_by = best_of(usable, policy.measured)
    else:
        best = next((v for v in usable if v.name == named), None)
    selection = SamplerSelection(
        request=request,
        device=device,
        policy=policy,
        chosen=None if best is None else best.name,
        sampler=None if best is None else classes[best.name],
        decided_by=decided_by,
        verdicts=tuple(v.as_chosen() if v is best else v for v in verdicts),
    )
    if best is None:
        raise _refusal(selection, named)
    return selection


def _judge(
    candidate: type[SamplerBackend],
    request: SamplerRequest,
    device: DeviceFacts,
    inventory: Inventory,
) -> Verdict:
    """Return the verdict on one candidate: the device, what is asked, then the library."""
    reasons = candidate.check(request, device)
    entry = None if candidate.vendor is None else inventory.get(candidate.vendor.name)
    status, detail = VerdictStatus.ELIGIBLE, ""
    if reasons:
        status = VerdictStatus.REJECTED
    elif entry is not None and not entry.is_usable:
        status, detail = VerdictStatus.UNAVAILABLE, entry.describe()
    return Verdict(
        name=candidate.name,
        status=status,
        priority=candidate.priority,
        provenance=candidate.provenance,
        reasons=reasons,
        detail=detail,
    )


def _unavailable(name: str, words: str) -> Verdict:
    return Verdict(name=name, status=VerdictStatus.UNAVAILABLE, detail=words)


def _refusal(selection: SamplerSelection, named: str | None) -> AttnError:
    place = f"{selection.device.name} ({selection.device.arch})"
    if named is None:
        return NoBackendError(f"no sampler serves this call on {place}:\n{selection}\n")
    verdict = selection.verdict(named)
    others = [v.name for v in selection.verdicts if v.status is VerdictStatus.ELIGIBLE]
    hint = f"{', '.join(others)} would serve it." if others else "no other sampler serves it."
    words = f"sampler {named} cannot serve this call on {place}: {verdict.summary()}."
    if verdict.status is VerdictStatus.UNAVAILABLE:
        return VendorMissingError(words, hint=hint)
    return BackendRejectedError(words, hint=hint)
