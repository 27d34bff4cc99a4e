"""Bounds on the host and masks on the device say the same about who sees whom."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attn_shared.errors import MetadataError
from attn_torch._visibility import Visibility, overlapping

_SIDES = st.one_of(st.none(), st.integers(0, 6))


def _mask(visibility: Visibility, position: int, rows: int, keys: int, causal: bool) -> list:
    query = torch.arange(position, position + rows).unsqueeze(1)
    key = torch.arange(keys).unsqueeze(0)
    return visibility.mask(query, key, is_causal=causal).tolist()


def test_a_causal_window_of_three_keys():
    window = Visibility(window=(2, 0))
    assert _mask(window, 1, 3, 4, True) == [
        [True, True, False, False],
        [True, True, True, False],
        [False, True, True, True],
    ]


def test_a_two_sided_window_looks_right_where_rows_are_not_causal():
    window = Visibility(window=(1, 1))
    assert _mask(window, 0, 2, 4, False) == [
        [True, True, False, False],
        [True, True, True, False],
    ]
    assert _mask(window, 0, 2, 4, True) == [
        [True, False, False, False],
        [True, True, False, False],
    ]


def test_chunks_hide_earlier_chunks():
    chunks = Visibility(chunk_size=3)
    assert _mask(chunks, 2, 3, 5, True) == [
        [True, True, True, False, False],
        [False, False, False, True, False],
        [False, False, False, True, True],
    ]


def test_ranges_widen_the_causal_mask_in_both_directions():
    query = torch.arange(4).unsqueeze(1)
    key = torch.arange(4).unsqueeze(0)
    mask = Visibility().mask(query, key, is_causal=True, ranges=[(1, 2)])
    assert mask.tolist() == [
        [True, False, False, False],
        [True, True, True, False],
        [True, True, True, False],
        [True, True, True, True],
    ]


def test_without_any_rule_the_mask_still_has_a_row_for_each_query():
    assert _mask(Visibility(), 0, 3, 2, False) == [[True, True]] * 3


@given(
    left=_SIDES,
    right=_SIDES,
    chunk=st.one_of(st.none(), st.integers(1, 5)),
    causal=st.booleans(),
    rows=st.integers(1, 6),
    keys=st.integers(0, 12),
)
@settings(max_examples=300, derandomize=True, deadline=None)
def test_bounds_are_the_ends_of_the_mask(left, right, chunk, causal, rows, keys):
    if chunk is not None:
        causal = True
    visibility = Visibility(window=(left, right), chunk_size=chunk)
    position = keys - rows
    mask = _mask(visibility, position, rows, keys, causal)
    blind = visibility.num_blind_rows(position, rows, keys, is_causal=causal)
    for row, seen in enumerate(mask):
        visible = [index for index, is_seen in enumerate(seen) if is_seen]
        if row < blind:
            assert visible == []
            continue
        first = visibility.first_key(position + row)
        last = visibility.last_key(position + row, keys, is_causal=causal)
        assert visible == list(range(first, last + 1)) != []


def test_overlapping_keeps_ranges_that_hold_a_position():
    ranges = [(0, 2), (3, 3), (5, 9)]
    assert overlapping(ranges, 3, 5) == ((3, 3), (5, 9))
    assert overlapping(ranges, 10, 12) == ()


@pytest.mark.parametrize("bad", [(3, 2), (-1, 2)])
def test_a_range_that_is_none_is_refused(bad):
    with pytest.raises(MetadataError, match=r"mm_prefix_ranges.*0 <= start <= end"):
        overlapping([bad], 0, 9)
