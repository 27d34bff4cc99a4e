"""The order in which a round measures its contenders."""

from __future__ import annotations

import random
from collections.abc import Iterator

__all__ = ["orders"]


def orders(count: int, rounds: int, *, seed: int = 0) -> Iterator[tuple[int, ...]]:
    """Yield, for each round, the order in which `count` contenders are measured.

    Where one stands matters: it finds caches, clocks and other processes as its predecessor left
    them. So each `count` rounds shuffle the contenders anew and rotate them, which puts every
    contender once in every place, after predecessors that change from shuffle to shuffle.

    Args:
        count: contenders.
        rounds: how many orders; over a multiple of `count` each is first equally often.
        seed: of the shuffles.
    """
    generator = random.Random(seed)
    order = list(range(count))
    for done in range(rounds):
        turn = done % count
        if turn == 0:
            generator.shuffle(order)
        yield (*order[turn:], *order[:turn])
