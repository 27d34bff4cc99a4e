"""Between padded rows and requests, by hand."""

from __future__ import annotations

import pytest
import torch
from hf_testing import padding_mask

from attn_shared.errors import UnsupportedOptionError
from attn_transformers.tokens import Requests, Tokens, has_gap, is_binding, refuse_gap

CPU = torch.device("cpu")
NO_WINDOW = (None, None)


def states(batch_size: int, width: int) -> torch.Tensor:
    """(B, 1, width, 1), each place holding row * 10 + column."""
    grid = torch.arange(batch_size)[:, None] * 10 + torch.arange(width)
    return grid[:, None, :, None].float()


def test_all_places_in_order() -> None:
    tokens = Tokens.where(torch.ones(2, 3, dtype=torch.bool), CPU)
    assert tokens.places is None
    assert tokens.count == 6
    assert tokens.gather(states(2, 4)).flatten().tolist() == [0, 1, 2, 10, 11, 12]


def test_chosen_places_go_out_and_come_back() -> None:
    tokens = Tokens.where(padding_mask(3, 1, 2).bool(), CPU)
    rows = tokens.gather(states(2, 3))
    assert rows.flatten().tolist() == [2, 11, 12]
    assert tokens.scatter(rows).squeeze().tolist() == [[0, 0, 2], [0, 11, 12]]


def test_rows_without_padding_are_one_request_each() -> None:
    requests = Requests.unpadded(2, 1, 5)
    assert (requests.rows, requests.query_lens, requests.seq_lens) == ((0, 1), (1, 1), (5, 5))
    assert requests.queries.places is None
    assert requests.num_unwritten == 0


def test_padding_on_the_left_is_left_out() -> None:
    requests = Requests.padded(padding_mask(4, 4, 1, 3).bool(), 2, NO_WINDOW, CPU)
    assert requests.rows == (0, 1, 2)
    assert requests.query_lens == (2, 1, 2)
    assert requests.seq_lens == (4, 1, 3)
    assert requests.queries.places is not None
    assert requests.queries.places.tolist() == [0, 1, 3, 4, 5]


def test_a_row_without_a_real_query_is_no_request() -> None:
    mask = torch.tensor([[0, 0, 0, 0], [0, 1, 1, 1]]).bool()
    requests = Requests.padded(mask, 2, NO_WINDOW, CPU)
    assert requests.rows == (1,)
    assert requests.seq_lens == (3,)


def test_the_last_place_is_answered_from_all_real_keys_even_if_it_is_padding() -> None:
    mask = padding_mask(4, 2, 4, side="right").bool()
    requests = Requests.padded(mask, 4, NO_WINDOW, CPU)
    assert requests.rows == (0, 1, 0)
    assert requests.query_lens == (2, 4, 1)
    assert requests.seq_lens == (2, 4, 2)
    assert requests.num_unwritten == 1
    assert requests.queries.places is not None
    assert requests.queries.places.tolist() == [0, 1, 4, 5, 6, 7, 3]


@pytest.mark.parametrize(("window", "rows"), [((2, 0), (0, 1)), ((3, 0), (0, 1, 0))])
def test_unless_a_window_counts_the_padding(window: tuple[int, int], rows: tuple[int, ...]) -> None:
    mask = padding_mask(4, 2, 4, side="right").bool()
    assert Requests.padded(mask, 4, window, CPU).rows == rows


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        ([[0, 0, 1, 1]], False),
        ([[1, 1, 0, 0]], False),
        ([[0, 1, 1, 0]], False),
        ([[0, 0, 0, 0]], False),
        ([[1, 0, 1, 1]], True),
        ([[0, 1, 0, 1]], True),
        ([[1, 1, 1, 1], [1, 0, 0, 1]], True),
    ],
)
def test_gaps(mask: list[list[int]], expected: bool) -> None:
    assert has_gap(torch.tensor(mask).bool()) is expected


@pytest.mark.parametrize(
    ("window", "key_len", "expected"),
    [((None, None), 99, False), ((4, 0), 5, False), ((4, 0), 6, True), ((3, 3), 5, True)],
)
def test_binding_windows(window: tuple[int, int], key_len: int, expected: bool) -> None:
    assert is_binding(window, key_len) is expected


def test_a_window_over_a_gap_is_refused_where_it_hides_something() -> None:
    refuse_gap((4, 0), 5)
    with pytest.raises(UnsupportedOptionError, match="pad on the left"):
        refuse_gap((4, 0), 6)
