"""The rule itself, by hand."""

from __future__ import annotations

import math

import pytest

from attn_shared.sampling.reference import exact_row

LOG = [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]


def kept(row: object) -> list[int]:
    return [token for token, is_kept in enumerate(row.kept) if is_kept]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, [0, 1, 2, 3]),
        ({"top_k": 2}, [0, 1]),
        ({"top_k": 0}, [0, 1, 2, 3]),
        ({"top_k": -1}, [0, 1, 2, 3]),
        ({"top_k": 2**40}, [0, 1, 2, 3]),
        ({"top_p": 0.5}, [0, 1]),
        ({"top_p": 0.0}, [0]),
        ({"top_p": 1.0}, [0, 1, 2, 3]),
        ({"min_p": 0.5}, [0, 1, 2]),
        ({"temperature": 0.0}, [0]),
        # 0.4 and 0.3 of the 0.7 that two tokens hold: 0.571 is not less than 0.55.
        ({"top_k": 2, "top_p": 0.55}, [0]),
    ],
)
def test_filters_by_hand(asked: dict[str, float], expected: list[int]) -> None:
    assert kept(exact_row(LOG, **asked)) == expected  # type: ignore[arg-type]


def test_top_k_comes_first() -> None:
    # Of all, 0.4 + 0.3 is needed for 0.65; of the two that top-k leaves, 0.4 / 0.7 = 0.57 as well.
    row = exact_row(LOG, top_k=2, top_p=0.65)
    assert row.probabilities == pytest.approx((4 / 7, 3 / 7, 0, 0))


def test_ties_at_the_cut_are_kept_and_greedy_takes_the_first() -> None:
    logits = [1.0, 2.0, 2.0, 0.0, 1.0]
    assert kept(exact_row(logits, top_k=1)) == [1, 2]
    assert kept(exact_row(logits, top_k=3)) == [0, 1, 2, 4]
    assert kept(exact_row(logits, top_p=0.1)) == [1, 2]
    assert kept(exact_row(logits, top_p=0.0)) == [1]
    assert kept(exact_row(logits, temperature=0.0)) == [1]


def test_temperature_sharpens_before_top_p() -> None:
    assert kept(exact_row(LOG, top_p=0.39)) == [0]
    assert kept(exact_row(LOG, temperature=10.0, top_p=0.39)) == [0, 1]


@pytest.mark.parametrize("logits", [[math.nan, 1.0], [-math.inf] * 2, [math.inf, 0.0]])
def test_a_row_without_a_distribution_is_not_valid(logits: list[float]) -> None:
    row = exact_row(logits, top_k=1, top_p=0.5)
    assert not row.valid
    assert row.probabilities == (0.0, 0.0)


def test_a_forbidden_token_is_never_kept() -> None:
    row = exact_row([-math.inf, 0.0, 0.0], top_k=3)
    assert row.kept == (False, True, True)
    assert row.probabilities == (0.0, 0.5, 0.5)


def test_the_margin_says_how_close_a_cut_was() -> None:
    assert exact_row(LOG, top_p=0.5).margin == pytest.approx(0.1)
    assert exact_row(LOG).margin == math.inf
