from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from attn_bench.medians import interval, median, ratios

TIMES = st.lists(st.floats(min_value=0.1, max_value=1e6), min_size=1, max_size=40)


@settings(max_examples=40)
@given(TIMES)
def test_the_interval_contains_the_median_and_is_repeatable(values: list[float]) -> None:
    low, high = interval(values)
    assert min(values) <= low <= median(values) <= high <= max(values)
    assert interval(values) == (low, high)


def test_one_measurement_is_its_own_interval() -> None:
    assert interval([3.0]) == (3.0, 3.0)


def test_more_measurements_narrow_the_interval() -> None:
    few, many = [float(i) for i in range(10)], [i / 40 for i in range(400)]
    assert _width(many) < _width(few) / 3


def _width(values: list[float]) -> float:
    low, high = interval(values)
    return high - low


def test_ratios_are_those_of_each_round() -> None:
    # The second round was twice as slow for both, and does not matter.
    assert ratios([1.0, 4.0, 3.0], [2.0, 8.0, 2.0]) == [0.5, 0.5, 1.5]
