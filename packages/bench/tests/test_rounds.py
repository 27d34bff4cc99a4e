from __future__ import annotations

import itertools
from collections import Counter

import pytest

from attn_bench.rounds import orders


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_every_contender_is_in_every_place_equally_often(count: int) -> None:
    found = list(orders(count, 4 * count))
    for place in range(count):
        assert Counter(order[place] for order in found) == dict.fromkeys(range(count), 4)


@pytest.mark.parametrize("rounds", [1, 4, 7])
def test_otherwise_at_most_one_round_apart(rounds: int) -> None:
    first = Counter(dict.fromkeys(range(3), 0))
    first.update(order[0] for order in orders(3, rounds))
    assert max(first.values()) - min(first.values()) <= 1
    assert first.total() == rounds


def test_each_order_has_everyone_once() -> None:
    for order in orders(4, 9):
        assert sorted(order) == [0, 1, 2, 3]


def test_predecessors_change_from_shuffle_to_shuffle() -> None:
    pairs = {pair for order in orders(4, 40) for pair in itertools.pairwise(order)}
    assert len(pairs) == 4 * 3


def test_a_seed_gives_the_same_orders() -> None:
    assert list(orders(3, 12, seed=5)) == list(orders(3, 12, seed=5))
    assert list(orders(3, 12, seed=5)) != list(orders(3, 12, seed=6))
