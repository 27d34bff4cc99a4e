"""The result of a selection: what was chosen, who decided, and a verdict on every candidate."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from attn_shared._plugins import BackendKind
from attn_shared.backend import AttentionBackend
from attn_shared.capability import Reason
from attn_shared.device import DeviceFacts
from attn_shared.dtypes import KVCacheLayout
from attn_shared.errors import InvalidInputError, NoBackendError, UnknownNameError
from attn_shared.kernel_paths import KernelPath
from attn_shared.mla_prefill import MLAPrefill
from attn_shared.request import AttentionRequest

__all__ = [
    "SCHEMA_VERSION",
    "DecidedBy",
    "Policy",
    "Selection",
    "Verdict",
    "VerdictStatus",
    "best_of",
]

SCHEMA_VERSION = 1
"""Version of `Selection.to_dict`."""


class DecidedBy(StrEnum):
    """Who decided, in order of precedence."""

    MODEL = "model"
    USER = "user"
    PREFERENCE = "preference"
    MEASURED = "measured"
    DEFAULT = "default"


class VerdictStatus(StrEnum):
    """What became of a candidate."""

    CHOSEN = "chosen"
    ELIGIBLE = "eligible"
    REJECTED = "rejected"
    UNAVAILABLE = "unavailable"
    UNKNOWN = "unknown"
    """A library must be probed before an answer can be given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Who named which backend.

    Attributes:
        required: the one backend that the model can run on; it overrules what the user named.
        backend: the one that the user named; None or "auto" leaves the choice.
        source: where the user named it ("argument", "environment ATTN_BACKEND", ...).
        prefer: vendor libraries ("aiter") that the user opts into: of the backends that serve a
            request without a slow path, those that run on one of these come first.
        avoid: vendor libraries that the user opts out of: they count as not installed.
        measured: backends by measured time on this very device, fastest first.
        remarks: what the reader of the answer must know of this, such as where the times are from,
            or why a table of them was left aside.
    """

    required: str | None = None
    backend: str | None = None
    source: str = "argument"
    prefer: tuple[str, ...] = ()
    avoid: tuple[str, ...] = ()
    measured: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Take "auto", in any case, for no name.

        Raises:
            InvalidInputError: a library is preferred and avoided, a name is no string, or several
                names are no tuple.
        """
        for field_name in ("required", "backend", "source"):
            name = getattr(self, field_name)
            if not isinstance(name, str) and (name is not None or field_name == "source"):
                raise InvalidInputError.for_argument(field_name, repr(name), "a string")
        if self.backend is not None and self.backend.lower() == "auto":
            object.__setattr__(self, "backend", None)
        for field_name in ("prefer", "avoid", "measured", "remarks"):
            names = getattr(self, field_name)
            if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
                raise InvalidInputError.for_argument(field_name, repr(names), "a tuple of names")
        both = sorted(set(self.prefer) & set(self.avoid))
        if both:
            raise InvalidInputError.for_argument(
                "prefer", ", ".join(both), "libraries that are not avoided as well"
            )

    def named(self) -> tuple[str | None, DecidedBy]:
        """Return the name that binds, and whose it is; None leaves the choice."""
        if self.required is not None:
            return self.required, DecidedBy.MODEL
        if self.backend is not None:
            return self.backend, DecidedBy.USER
        return None, DecidedBy.DEFAULT


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What became of one candidate, and why.

    Attributes:
        name: the backend.
        status: the outcome.
        priority: its rank for "auto"; None: by name only.
        provenance: where the rank comes from.
        reasons: why it was rejected.
        detail: why it is unavailable or unknown, in the library's own words.
        slow_features: what the request asks for and only its slow path serves.
        is_preferred: it runs on a library that the policy prefers.
        needs_probe: libraries that must be probed first.
        kv_layout: the cache layout that it would get.
        block_size: the block size that it would get.
        paths: which of its kernels it would run the request on, where it has several.
    """

    name: str
    status: VerdictStatus
    priority: int | None = None
    provenance: str = ""
    reasons: tuple[Reason, ...] = ()
    detail: str = ""
    slow_features: tuple[str, ...] = ()
    is_preferred: bool = False
    needs_probe: tuple[str, ...] = ()
    kv_layout: KVCacheLayout | None = None
    block_size: int | None = None
    paths: tuple[KernelPath, ...] = ()

    @property
    def is_promoted(self) -> bool:
        """Whether the policy's preference puts it first: only where it needs no slow path."""
        return self.is_preferred and not self.slow_features and self.priority is not None

    @property
    def rank(self) -> tuple[bool, bool, int]:
        """Its place for "auto", the least first: a slow path comes after all that need none."""
        return (not self.is_promoted, bool(self.slow_features), -(self.priority or 0))

    def steps(self) -> tuple[str, ...]:
        """Say what it would take to get this backend; nothing where it was chosen."""
        match self.status:
            case VerdictStatus.CHOSEN:
                return ()
            case VerdictStatus.ELIGIBLE:
                return (f"name it: backend={self.name!r}",)
            case VerdictStatus.REJECTED:
                return tuple(reason.step() for reason in self.reasons)
        return (self.detail,)

    def as_chosen(self) -> Verdict:
        """Return this verdict with the status "chosen"."""
        return replace(self, status=VerdictStatus.CHOSEN)

    def summary(self) -> str:
        """Say why in one line."""
        parts = [str(reason) for reason in self.reasons]
        if self.detail:
            parts.append(self.detail)
        if parts:
            return "; ".join(parts)
        rank = "taken by name only" if self.priority is None else f"priority {self.priority}"
        parts = [f"{rank}: {self.provenance}" if self.provenance else rank]
        if self.slow_features:
            parts.append(f"slow path for {', '.join(self.slow_features)}")
        if self.is_promoted:
            parts.append("preferred by the policy")
        return "; ".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-safe values."""
        return {
            "name": self.name,
            "status": str(self.status),
            "priority": self.priority,
            "provenance": self.provenance,
            "reasons": [reason.to_dict() for reason in self.reasons],
            "detail": self.detail,
            "slow_features": list(self.slow_features),
            "is_preferred": self.is_preferred,
            "needs_probe": list(self.needs_probe),
            "kv_layout": None if self.kv_layout is None else str(self.kv_layout),
            "block_size": self.block_size,
            "paths": [path.to_dict() for path in self.paths],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The answer to one request on one device.

    Attributes:
        request, device, policy: what was asked.
        chosen: the backend's name; None only inside a NoBackendError.
        backend: its class.
        kv_layout: the layout that the cache must have.
        block_size: tokens per block.
        decided_by: who decided.
        verdicts: one per candidate, in the order of their ranks.
        failures: plugins that could not be loaded, in their own words.
        kind: the registry that the names are of.
    """

    request: AttentionRequest
    device: DeviceFacts
    policy: Policy
    chosen: str | None
    backend: type[Any] | None = field(repr=False)
    kv_layout: KVCacheLayout | None
    block_size: int | None
    decided_by: DecidedBy
    verdicts: tuple[Verdict, ...]
    failures: tuple[str, ...] = ()
    kind: BackendKind = "attention"

    @property
    def backend_cls(self) -> type[AttentionBackend]:
        """The chosen backend's class.

        Raises:
            NoBackendError: nothing was chosen.
        """
        if self.backend is None:
            raise NoBackendError("nothing was chosen.", selection=self)
        return self.backend

    @property
    def prefill_cls(self) -> type[MLAPrefill]:
        """The chosen prefill's class, of a selection of kind "mla_prefill".

        Raises:
            NoBackendError: nothing was chosen, or it is no prefill.
        """
        if self.backend is None or not issubclass(self.backend, MLAPrefill):
            raise NoBackendError(f"{self.chosen} is no MLA prefill.", selection=self)
        return self.backend

    def verdict(self, name: str) -> Verdict:
        """Return the verdict on one candidate.

        Raises:
            UnknownNameError: it was none.
        """
        for verdict in self.verdicts:
            if verdict.name == name:
                return verdict
        raise UnknownNameError.for_name("candidate", name, (v.name for v in self.verdicts))

    def runner_up(self) -> Verdict | None:
        """Return the candidate that comes next, or None where there is no other.

        That is the one that would be chosen without the first: the fastest of those measured, else
        the highest ranked, else one taken by name only. Where no other serves the request, it is
        the one that the least stands in the way of.
        """
        others = [v for v in self.verdicts if v.name != self.chosen]
        eligible = [v for v in others if v.status is VerdictStatus.ELIGIBLE]
        ranked = best_of(eligible, self.policy.measured)[0]
        if ranked is not None or eligible:
            return ranked or eligible[0]
        return min(others, key=lambda verdict: len(verdict.steps()), default=None)

    def ahead(self) -> tuple[Verdict, ...]:
        """Return the candidates that "auto" would take before the chosen one, if they could run."""
        mine = next((v for v in self.verdicts if v.name == self.chosen), None)
        blocked = (VerdictStatus.REJECTED, VerdictStatus.UNAVAILABLE, VerdictStatus.UNKNOWN)
        return tuple(
            verdict
            for verdict in self.verdicts
            if verdict.status in blocked
            and verdict.priority is not None
            and (mine is None or mine.priority is None or verdict.rank < mine.rank)
        )

    def notes(self) -> tuple[str, ...]:
        """Return what a reader must know beside the verdicts."""
        notes = list(self.device.notes)
        if self.device.is_simulated:
            notes.append(
                f"{self.device.name} is simulated: every vendor library is assumed installed, "
                "and nothing is run to give this answer."
            )
        if self.decided_by is DecidedBy.USER:
            notes.append(f"{self.policy.backend} was named by {self.policy.source}")
        if self.policy.prefer:
            notes.append(f"the policy prefers {', '.join(self.policy.prefer)}")
        if self.policy.avoid:
            notes.append(f"the policy avoids {', '.join(self.policy.avoid)}")
        if self.decided_by is DecidedBy.MODEL and self.policy.backend not in (None, self.chosen):
            notes.append(
                f"{self.policy.backend} was named by {self.policy.source}, and is overruled: the "
                f"model runs on {self.policy.required} only"
            )
        notes += self.policy.remarks
        return (*notes, *(f"plugin failed: {failure}" for failure in self.failures))

    def one_line(self) -> str:
        """Say what was chosen and by whom, for a log."""
        others = [v.name for v in self.verdicts if v.status is VerdictStatus.REJECTED]
        rejected = f"; rejected: {', '.join(others)}" if others else ""
        return (
            f"{self.chosen} chosen by {self.decided_by} for {self.device.name} "
            f"({self.device.arch}), block_size={self.block_size}, kv_layout={self.kv_layout}"
            f"{rejected}"
        )

    def table(self) -> str:
        """Return a line per verdict: name, status and why."""
        width = max((len(verdict.name) for verdict in self.verdicts), default=0)
        return "\n".join(
            f"{verdict.name:<{width}}  {verdict.status:<11}  {verdict.summary()}"
            for verdict in self.verdicts
        )

    def explain(self) -> str:
        """Return what was chosen, the table of every verdict, and the notes."""
        head = self.one_line() if self.chosen else f"nothing chosen for {self.device.name}"
        lines = [head, self.table()]
        if self.chosen:
            lines += [f"it runs {path}" for path in self.verdict(self.chosen).paths]
        lines += [f"before it: {_way_to(verdict)}" for verdict in self.ahead() if self.chosen]
        runner_up = self.runner_up()
        if runner_up is not None:
            is_served = runner_up.status is VerdictStatus.ELIGIBLE
            lines.append(f"{'next' if is_served else 'nearest'}: {_way_to(runner_up)}")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes())])

    def __str__(self) -> str:
        """Read as the table."""
        return self.explain()

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-safe values with a schema version."""
        runner_up = self.runner_up()
        return {
            "schema_version": SCHEMA_VERSION,
            "request": self.request.to_dict(),
            "device": self.device.to_dict(),
            "chosen": self.chosen,
            "kv_layout": None if self.kv_layout is None else str(self.kv_layout),
            "block_size": self.block_size,
            "decided_by": str(self.decided_by),
            "verdicts": [verdict.to_dict() for verdict in self.verdicts],
            "runner_up": None if runner_up is None else _alternative(runner_up),
            "ahead": [_alternative(verdict) for verdict in self.ahead()],
            "notes": list(self.notes()),
            "failures": list(self.failures),
        }


def best_of(
    verdicts: Iterable[Verdict], measured: Iterable[str] = ()
) -> tuple[Verdict | None, DecidedBy]:
    """Return the verdict that "auto" takes among usable ones, and who decides so.

    The one measured fastest, else the highest ranked; those without a rank are left out, and where
    the policy prefers some, all others.
    """
    ranked = {v.name: v for v in verdicts if v.priority is not None}
    promoted = {name: v for name, v in ranked.items() if v.is_promoted}
    among = promoted or ranked
    for name in measured:
        if name in among:
            return among[name], DecidedBy.PREFERENCE if promoted else DecidedBy.MEASURED
    best = min(among.values(), key=lambda verdict: verdict.rank, default=None)
    return best, DecidedBy.PREFERENCE if promoted else DecidedBy.DEFAULT


def _way_to(verdict: Verdict) -> str:
    return f"{verdict.name}; to get it: {'; '.join(verdict.steps())}"


def _alternative(verdict: Verdict) -> dict[str, Any]:
    return {"name": verdict.name, "status": str(verdict.status), "steps": list(verdict.steps())}
