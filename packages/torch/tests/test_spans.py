"""Rows of a request cut into calls: every visible pair is covered, none twice, none for nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attn_torch._spans import Chunk, Cover, Span, row_chunks, spans_of
from attn_torch._visibility import Visibility


def _span(query_len: int, key_len: int, **options) -> Span:
    return Span(
        request=0,
        query_start=0,
        query_len=query_len,
        position=key_len - query_len,
        key_len=key_len,
        **options,
    )


def _covers(chunks: tuple[Chunk, ...]) -> list[Cover]:
    return [chunk.cover for chunk in chunks]


def test_a_decode_sees_all_keys_without_a_mask():
    assert row_chunks(_span(1, 9), Visibility()) == (
        Chunk(first_row=0, num_rows=1, first_key=0, num_keys=9, cover=Cover.FULL),
    )


def test_a_decode_in_a_window_reads_the_window_only():
    (chunk,) = row_chunks(_span(1, 9), Visibility(window=(2, 0)))
    assert (chunk.first_key, chunk.num_keys, chunk.cover) == (6, 3, Cover.FULL)


def test_a_prompt_is_square_and_its_continuation_is_not():
    (prompt,) = row_chunks(_span(5, 5), Visibility())
    (rest,) = row_chunks(_span(5, 8), Visibility())
    assert prompt.cover is Cover.SQUARE
    assert rest.cover is Cover.MASKED


def test_a_window_wider_than_the_prompt_leaves_it_square():
    (chunk,) = row_chunks(_span(5, 5), Visibility(window=(4, 0)))
    assert chunk.cover is Cover.SQUARE
    (chunk,) = row_chunks(_span(5, 5), Visibility(window=(3, 0)))
    assert chunk.cover is Cover.MASKED


def test_rows_that_fill_a_local_chunk_are_square_at_its_start():
    span = replace(_span(3, 9), position=6)
    (chunk,) = row_chunks(span, Visibility(chunk_size=3))
    assert (chunk.first_key, chunk.num_keys, chunk.cover) == (6, 3, Cover.SQUARE)


def test_non_causal_rows_need_no_mask():
    (chunk,) = row_chunks(_span(5, 8, is_causal=False), Visibility())
    assert (chunk.num_keys, chunk.cover) == (8, Cover.FULL)


def test_masked_rows_are_cut_and_each_part_has_its_own_keys():
    chunks = row_chunks(_span(5, 8), Visibility(window=(2, 0)), masked_rows=2)
    assert [(c.first_row, c.num_rows, c.first_key, c.num_keys) for c in chunks] == [
        (0, 2, 1, 4),
        (2, 2, 3, 4),
        (4, 1, 5, 3),
    ]
    assert _covers(chunks) == [Cover.MASKED, Cover.MASKED, Cover.FULL]


def test_logits_bound_every_cover_and_a_row_is_never_cut():
    square = row_chunks(_span(6, 6), Visibility(), max_logits=12)
    assert [c.num_rows for c in square] == [2, 2, 2]
    assert _covers(square) == [Cover.SQUARE, Cover.MASKED, Cover.MASKED]
    full = row_chunks(_span(4, 6, is_causal=False), Visibility(), max_logits=3)
    assert [c.num_rows for c in full] == [1, 1, 1, 1]


def test_a_mask_has_at_most_its_elements():
    chunks = row_chunks(_span(6, 9), Visibility(), max_masked=27)
    assert [c.num_rows for c in chunks] == [3, 3]


def test_a_range_widens_the_keys_of_its_rows():
    span = _span(4, 10, ranges=((7, 9),))
    (chunk,) = row_chunks(span, Visibility(window=(1, 0)))
    assert (chunk.first_key, chunk.stop_key, chunk.cover) == (5, 10, Cover.MASKED)


def test_blind_rows_are_apart_and_neighbours_are_one_slice():
    spans, blind = spans_of(
        [0, 3, 4, 6, 6, 8],
        [1, 0, 0, 5, 9],
        is_causal=[True] * 5,
        visibility=Visibility(),
    )
    assert blind == [slice(0, 2), slice(3, 6)]
    assert [(s.request, s.query_start, s.query_len, s.position) for s in spans] == [
        (0, 2, 1, 0),
        (4, 6, 2, 7),
    ]


def test_rows_left_of_the_first_key_see_it_when_the_window_looks_right():
    spans, blind = spans_of([0, 4], [2], is_causal=[False], visibility=Visibility(window=(None, 1)))
    assert blind == [slice(0, 1)]
    assert spans[0].position == -1


@given(
    query_len=st.integers(1, 9),
    earlier=st.integers(0, 9),
    left=st.one_of(st.none(), st.integers(0, 5)),
    right=st.one_of(st.none(), st.integers(0, 5)),
    causal=st.booleans(),
    start=st.integers(0, 17),
    length=st.integers(0, 6),
    masked_rows=st.integers(1, 5),
    max_logits=st.one_of(st.none(), st.integers(1, 40)),
)
@settings(max_examples=400, derandomize=True, deadline=None)
def test_chunks_cover_what_the_mask_shows(
    query_len, earlier, left, right, causal, start, length, masked_rows, max_logits
):
    visibility = Visibility(window=(left, right))
    span = _span(
        query_len, query_len + earlier, is_causal=causal, ranges=((start, start + length),)
    )
    query = torch.arange(earlier, earlier + query_len).unsqueeze(1)
    key = torch.arange(span.key_len).unsqueeze(0)
    mask = visibility.mask(query, key, is_causal=causal, ranges=span.ranges)
    chunks = row_chunks(span, visibility, masked_rows=masked_rows, max_logits=max_logits)
    assert [c.first_row for c in chunks] == [0, *(c.stop_row for c in chunks[:-1])]
    assert chunks[-1].stop_row == query_len
    for chunk in chunks:
        rows = mask[chunk.first_row : chunk.stop_row]
        inside = rows[:, chunk.first_key : chunk.stop_key]
        assert int(rows.sum()) == int(inside.sum())
        if chunk.cover is Cover.FULL:
            assert bool(inside.all())
        if chunk.cover is Cover.SQUARE:
            assert torch.equal(inside, torch.ones_like(inside).tril())
        if chunk.cover is Cover.MASKED:
            assert chunk.num_rows <= masked_rows
        if max_logits is not None:
            assert chunk.num_rows == 1 or chunk.num_rows * chunk.num_keys <= max_logits


@pytest.mark.parametrize("position", [-3, -1])
def test_first_key_is_never_negative(position):
    assert Visibility(window=(2, None), chunk_size=2).first_key(position) == 0
