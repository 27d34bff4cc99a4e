from __future__ import annotations

import pytest
import torch

from attn_conformance.case import Case
from attn_conformance.checks import (
    Answer,
    answer_of,
    check_cache,
    check_numbers,
    check_numbers_or_refusal,
    must_refuse,
    require,
)
from attn_conformance.engine import Result
from attn_conformance.rule import Violation
from attn_conformance.subject import Subject
from attn_shared.errors import InvalidInputError

CASE = Case(name="c", query_lens=(1, 5), seq_lens=(9, 5), num_padding_rows=1)
REFERENCE = "attn_conformance.reference_backend:ReferenceBackend"


@pytest.fixture
def subject() -> Subject:
    return Subject.find(REFERENCE)


def right(subject: Subject) -> tuple[Answer, Result]:
    batch = subject.batch(CASE)
    return answer_of(subject, batch), subject.engine(batch).run(batch, with_lse=True)


def test_a_right_answer_holds(subject: Subject) -> None:
    answer, result = right(subject)
    answer.hold(result)
    check_numbers(subject, CASE)


def test_rows_of_padding_do_not_matter(subject: Subject) -> None:
    answer, result = right(subject)
    result.output[6:] = torch.inf
    answer.hold(result)


def test_one_wrong_number_is_found_with_its_place_and_the_case(subject: Subject) -> None:
    answer, result = right(subject)
    result.output[4, 2, 7] += 1e-4
    with pytest.raises(Violation, match=r"half: output error .* at \(4, 2, 7\).*query_lens=\(1, 5"):
        answer.hold(result, "half")


def test_nan_is_found(subject: Subject) -> None:
    answer, result = right(subject)
    result.output[0, 0, 0] = torch.nan
    with pytest.raises(Violation, match="NaN"):
        answer.hold(result)


def test_a_wrong_lse_is_found(subject: Subject) -> None:
    answer, result = right(subject)
    assert result.lse is not None
    result.lse[1, 3] *= 1.001
    with pytest.raises(Violation, match=r"LSE at \(1, 3\)"):
        answer.hold(result)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.double(), "float64"),
        (lambda t: t[:-1], r"\(6, 4, 16\)"),
        (lambda t: t.flatten(1), r"\(7, 64\)"),
        (lambda t: None, "NoneType"),
        (lambda t: [t], "list"),
    ],
)
def test_another_kind_of_output_is_found(subject: Subject, change: object, words: str) -> None:
    answer, result = right(subject)
    with pytest.raises(Violation, match=words):
        answer.hold(Result(output=change(result.output)))  # type: ignore[operator]


def test_another_dtype_of_lse_is_found(subject: Subject) -> None:
    answer, result = right(subject)
    assert result.lse is not None
    with pytest.raises(Violation, match=r"LSE is .*float64"):
        answer.hold(Result(output=result.output, lse=result.lse.double()))


def test_an_unwritten_cache_is_found(subject: Subject) -> None:
    batch = subject.batch(CASE)
    with pytest.raises(Violation, match="blocks"):
        check_cache(batch)
    subject.engine(batch).write(batch)
    check_cache(batch)


def test_a_refusal_is_right_where_it_may_be() -> None:
    picky = Subject.find("conformance_backends:Picky")
    check_numbers_or_refusal(picky, CASE.with_fields(softcap=1.0))
    check_numbers_or_refusal(picky, CASE)


def test_wrong_numbers_are_no_refusal(monkeypatch: pytest.MonkeyPatch, subject: Subject) -> None:
    def wrong(subject: Subject, case: Case) -> None:
        raise Violation("off")

    monkeypatch.setattr("attn_conformance.checks.check_numbers", wrong)
    with pytest.raises(Violation, match="off"):
        check_numbers_or_refusal(subject, CASE)


def test_require() -> None:
    require(True, "fine")
    with pytest.raises(Violation, match="not fine"):
        require(False, "not fine")


def test_must_refuse_takes_an_error_that_names_the_argument() -> None:
    with must_refuse("a query of 2 dimensions", "query"):
        raise InvalidInputError.for_argument("query shape", (2, 3), "(T, Hq, D)")
    with must_refuse("anything"):
        raise ValueError("no")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (None, "is accepted"),
        (ValueError("shapes differ"), "without naming query"),
        (RuntimeError("mat1 and mat2: query"), "not refused before a kernel runs"),
        (AssertionError("query"), "not refused before a kernel runs"),
    ],
)
def test_must_refuse_finds_everything_else(error: Exception | None, words: str) -> None:
    with pytest.raises(Violation, match=words):
        _raise_within(error)


def _raise_within(error: Exception | None) -> None:
    with must_refuse("a wrong query", "query"):
        if error is not None:
            raise error
