"""Answers: what a backend says to a question on one device, found as the selector finds it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from attn_cli.matrix.questions import Changes, Question, plain_requests
from attn_shared.capability import Reason
from attn_shared.device import DeviceFacts
from attn_shared.errors import InvalidRequestError
from attn_shared.inventory import Inventory
from attn_shared.platform import Candidate
from attn_shared.registry import BackendRegistry
from attn_shared.request import AttentionRequest
from attn_shared.selection import Verdict, VerdictStatus
from attn_shared.verdicts import judge

__all__ = ["Answer", "Cell", "Witness"]


class Answer(StrEnum):
    """What a cell says, the best first."""

    YES = "yes"
    SLOW = "slow"
    """Served, by a path that is right and slow."""
    UNKNOWN = "unknown"
    """Not known before a library of this machine is probed."""
    UNAVAILABLE = "unavailable"
    """The backend or what it needs cannot be loaded, or its capability raised."""
    NO = "no"
    NO_QUESTION = "no question"
    """Nobody can ask it of such a backend: a width of heads where the cache holds latents."""

    @property
    def is_served(self) -> bool:
        """Whether the request runs, fast or slow."""
        return self in (Answer.YES, Answer.SLOW)


_ORDER = {answer: rank for rank, answer in enumerate(Answer)}

_ANSWERS = {
    VerdictStatus.REJECTED: Answer.NO,
    VerdictStatus.UNAVAILABLE: Answer.UNAVAILABLE,
    VerdictStatus.UNKNOWN: Answer.UNKNOWN,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """An answer and why.

    Attributes:
        answer: the answer.
        reasons: of NO: each with the limit.
        detail: of the other answers but YES: in words.
    """

    answer: Answer
    reasons: tuple[Reason, ...] = ()
    detail: str = ""

    @classmethod
    def of(cls, verdict: Verdict) -> Cell:
        """Return what a verdict comes to."""
        if verdict.status in _ANSWERS:
            answer = _ANSWERS[verdict.status]
            return cls(answer=answer, reasons=verdict.reasons, detail=verdict.detail)
        if verdict.slow_features:
            slow = f"slow path for {', '.join(verdict.slow_features)}"
            return cls(answer=Answer.SLOW, detail=slow)
        return cls(answer=Answer.YES)

    @property
    def refuses_device(self) -> bool:
        """Whether it is the device that is refused, so that no other request can help."""
        return any(reason.code == "device" for reason in self.reasons)

    @property
    def essence(self) -> tuple[Any, ...]:
        """What makes two cells equal: all but the name of the device that a limit refuses."""
        limits = tuple((reason.code, reason.allowed, reason.hint) for reason in self.reasons)
        return (self.answer, limits, self.detail)

    def why(self) -> str:
        """Return the reasons in one line; "" of a plain yes."""
        return "; ".join([*map(str, self.reasons), *([self.detail] if self.detail else [])])

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-safe values; what is empty is left out."""
        record: dict[str, Any] = {"answer": str(self.answer)}
        if self.reasons:
            record["reasons"] = [reason.to_dict() for reason in self.reasons]
        if self.detail:
            record["detail"] = self.detail
        return record


@dataclass(frozen=True, slots=True, kw_only=True)
class Witness:
    """One backend on one device, ready to be asked.

    Attributes:
        backend: its name.
        device: where it would run.
        inventory: what is installed there.
        registry: where the name is looked up.
    """

    backend: str
    device: DeviceFacts
    inventory: Inventory
    registry: BackendRegistry

    def judge(self, request: AttentionRequest) -> Verdict:
        """Return the verdict that a selection gives which names the backend."""
        candidate = Candidate(name=self.backend, priority=None, provenance="")
        return judge(candidate, request, self.device, self.inventory, self.registry)

    def rules(self) -> tuple[str, ...]:
        """Return names of the capability's rules; none where it cannot be asked."""
        # As `judge` does: what a third party's capability raises is its own affair, and its
        # verdict shows it.
        try:
            backend = self.registry.load(self.backend)
            rules = backend.capability(self.device, self.inventory).rules
            return tuple(rule.name for rule in rules)
        except Exception:  # noqa: BLE001
            return ()

    def plain_request(self) -> tuple[AttentionRequest, Verdict]:
        """Return the plainest request that is served, and the verdict on it.

        Where none is, the verdict with the fewest reasons says why.
        """
        refused: list[tuple[AttentionRequest, Verdict]] = []
        for request in plain_requests():
            verdict = self.judge(request)
            if verdict.status is not VerdictStatus.REJECTED or Cell.of(verdict).refuses_device:
                return request, verdict
            refused.append((request, verdict))
        return min(refused, key=lambda pair: len(pair[1].reasons))

    def ask(self, question: Question, plain: AttentionRequest) -> Cell:
        """Return the best answer of a question's ways.

        Args:
            question: what is asked.
            plain: the request that it differs from.
        """
        if question.needs_cache and plain.is_cache_free:
            return Cell(answer=Answer.NO_QUESTION, detail="such a request reads no cache")
        return _best(self._ask_one_way(plain, changes) for changes in question.ways)

    def _ask_one_way(self, plain: AttentionRequest, changes: Changes) -> Cell:
        try:
            request = plain.with_options(**changes)
        except InvalidRequestError as error:
            return Cell(answer=Answer.NO_QUESTION, detail=error.message)
        return Cell.of(self.judge(request))


def _best(cells: Iterable[Cell]) -> Cell:
    return min(cells, key=lambda cell: (_ORDER[cell.answer], len(cell.reasons)))
