"""What rules have in common: run a case, hold the answer to the reference, expect a refusal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from attn_conformance._caches import differing_blocks
from attn_conformance.batch import Batch
from attn_conformance.case import Case
from attn_conformance.engine import Result
from attn_conformance.rule import Violation
from attn_conformance.subject import Subject
from attn_shared.accuracy import check_against_reference
from attn_shared.errors import AttnError
from attn_shared.reference import ReferenceResult

__all__ = [
    "REFUSALS",
    "Answer",
    "answer_of",
    "check_cache",
    "check_numbers",
    "check_numbers_or_refusal",
    "must_refuse",
    "require",
    "unheld",
]

REFUSALS = (AttnError, ValueError, TypeError, NotImplementedError)
"""What a backend may raise to refuse; RuntimeError is what a kernel says when it is too late."""


_UNHELD: list[None] = []  # not empty: results are held to nothing


@contextmanager
def unheld() -> Iterator[None]:
    """Hold results to nothing, for steps that launch no kernel; cases go on to their next step."""
    _UNHELD.append(None)
    try:
        yield
    finally:
        _UNHELD.pop()


def require(holds: bool, message: str) -> None:
    """Raise a violation with this message unless something holds."""
    if not holds and not _UNHELD:
        raise Violation(message)


class Answer:
    """What a batch's result has to be, held against as many results as there are."""

    def __init__(
        self, batch: Batch, exact: ReferenceResult, eager: ReferenceResult, words: str
    ) -> None:
        self.batch = batch
        self.exact = exact
        self.eager = eager
        self.words = words

    def hold(self, result: Result, what: str = "") -> None:
        """Check kind, shape and numbers of a result.

        Raises:
            Violation: with the numbers and the case.
        """
        if _UNHELD:
            return
        prefix = f"{what}: " if what else ""
        self._check_tensor(f"{prefix}output", result.output, self.exact.output, self._dtype)
        if result.lse is not None:
            self._check_tensor(f"{prefix}LSE", result.lse, self.exact.lse, torch.float32)
        home = self.exact.output.device  # host memory, for a device without float64
        report = check_against_reference(
            result.output.to(home),
            None if result.lse is None else result.lse.to(home),
            self.exact,
            self.eager,
            dtype=self._dtype,
        )
        require(report.ok, f"{prefix}{report} in {self.words}")

    @property
    def _dtype(self) -> torch.dtype:
        return self.batch.case.dtype

    def _check_tensor(
        self, name: str, actual: object, expected: Tensor, dtype: torch.dtype
    ) -> None:
        require(isinstance(actual, Tensor), f"{name} is a {type(actual).__name__}, not a tensor")
        if not isinstance(actual, Tensor):
            return
        wanted = (tuple(expected.shape), dtype, self.batch.device.type)
        found = (tuple(actual.shape), actual.dtype, actual.device.type)
        require(found == wanted, f"{name} is {found}, not {wanted} in {self.words}")


def answer_of(subject: Subject, batch: Batch) -> Answer:
    """Return what a batch's result has to be for this backend."""
    capability = subject.capability
    expected = batch.expected(
        reads_fresh_kv=capability.reads_fresh_kv, fp8_products=capability.fp8_products
    )
    return Answer(batch, *expected, str(batch.case))


def check_numbers(subject: Subject, case: Case) -> None:
    """Run one step, without LSE and with it where it is served, and hold both to the budget."""
    batch = subject.batch(case)
    answer = answer_of(subject, batch)
    engine = subject.engine(batch)
    answer.hold(engine.run(batch))
    if subject.returns_lse_of(case):
        answer.hold(engine.run(batch, with_lse=True), "with LSE")


def check_numbers_or_refusal(subject: Subject, case: Case) -> None:
    """As `check_numbers`; that the case is refused with an error of its own is right as well."""
    try:
        check_numbers(subject, case)
    except REFUSALS as error:
        require(bool(str(error)), f"refused without a word: {type(error).__name__}")


def check_cache(batch: Batch) -> None:
    """Hold the cache, byte for byte, to what torch writes.

    Raises:
        Violation: names the blocks that differ.
    """
    if batch.kv_cache is None or batch.written_cache is None or batch.placement is None:
        raise TypeError("a batch over a cache has one")
    blocks = differing_blocks(batch.kv_cache, batch.written_cache, batch.placement)
    require(
        not blocks,
        f"the cache differs in blocks {blocks} from what attn_shared.kv_write stores for "
        f"slots {list(batch.placement.new_slots)} in {batch.case}",
    )


@contextmanager
def must_refuse(what: str, *names: str) -> Iterator[None]:
    """Expect a refusal that mentions one of some names (any refusal, without names).

    Raises:
        Violation: nothing is raised, or something that is no refusal, or it names none of them.
    """
    try:
        yield
    except REFUSALS as error:
        said = str(error).lower()
        if names and not any(name.lower() in said for name in names):
            raise Violation(
                f"{what} is refused without naming {' or '.join(names)}: "
                f"{type(error).__name__}: {error}"
            ) from error
        return
    except Exception as error:
        raise Violation(
            f"{what} is not refused before a kernel runs; it raised {type(error).__name__}: {error}"
        ) from error
    raise Violation(f"{what} is accepted")
