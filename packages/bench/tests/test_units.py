from __future__ import annotations

import pytest

from attn_bench.units import duration, figures, flops, percent, ratio_words


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0, "0"),
        (12.34, "12.3"),
        (9.999, "10.0"),
        (1234.0, "1230"),
        (0.012345, "0.0123"),
        (999.6, "1000"),
        (1.0, "1.00"),
    ],
)
def test_three_digits(value: float, words: str) -> None:
    assert figures(value) == words


@pytest.mark.parametrize(
    ("time_us", "words"), [(12.34, "12.3 us"), (1234.0, "1.23 ms"), (2_500_000.0, "2.50 s")]
)
def test_durations(time_us: float, words: str) -> None:
    assert duration(time_us) == words


def test_rates_of_operations() -> None:
    assert flops(0.4501) == "450 GFLOP/s"
    assert flops(788.0) == "788 TFLOP/s"


@pytest.mark.parametrize(
    ("share", "words"), [(0.852, "85%"), (0.0949, "9.5%"), (0.004, "0.4%"), (1.1, "110%")]
)
def test_shares(share: float, words: str) -> None:
    assert percent(share) == words


def test_ratios() -> None:
    assert [ratio_words(value) for value in (0.617, 1.1, 9.996)] == ["0.62", "1.10", "10.0"]
