"""Pool and tables: counts by hand, and any sequence of operations against what it should hold."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attn_shared.errors import InvalidInputError
from attn_transformers.blocks import BlockPool, BlockTables


def test_a_block_is_free_again_when_its_last_holder_lets_go() -> None:
    pool = BlockPool()
    block = pool.take()
    pool.share(block)
    assert pool.is_shared(block)
    pool.release(block)
    assert not pool.is_shared(block)
    assert pool.num_used == 1
    pool.release(block)
    assert (pool.num_used, pool.peak_used) == (0, 1)


def test_the_pool_grows_to_its_limit_and_no_further() -> None:
    pool = BlockPool(limit=3)
    assert {pool.take() for _ in range(3)} == {0, 1, 2}
    with pytest.raises(InvalidInputError, match=r"more than 3.*max_blocks=3"):
        pool.take()


@pytest.mark.parametrize("limit", [0, -16])
def test_a_limit_without_a_block_is_refused(limit: int) -> None:
    with pytest.raises(InvalidInputError, match=f"max_blocks is {limit}"):
        BlockPool(limit=limit)


def test_rows_that_grow_in_turn_have_no_run_of_blocks() -> None:
    tables = BlockTables(2, 2, BlockPool())
    for _ in range(3):
        tables.append([2, 2])
    first, second = tables.tensor([0, 1]).tolist()
    assert sorted(first + second) == [0, 1, 2, 3, 4, 5]
    assert first != sorted(range(first[0], first[0] + 3))


def test_a_row_takes_a_block_when_its_last_is_full() -> None:
    pool = BlockPool()
    tables = BlockTables(2, 4, pool)
    tables.append([3, 4])
    tables.append([1, 0])
    assert pool.num_used == 2
    tables.append([1, 0])
    assert pool.num_used == 3
    assert tables.lengths == [5, 4]
    assert tables.tensor([1, 0]).shape == (2, 2)


def test_a_full_pool_leaves_the_tables_as_they_were() -> None:
    pool = BlockPool(limit=3)
    tables = BlockTables(2, 2, pool)
    tables.append([2, 2])
    with pytest.raises(InvalidInputError):
        tables.append([2, 2])
    assert (tables.lengths, pool.num_used) == ([2, 2], 2)
    tables.append([2, 0])
    assert tables.lengths == [4, 2]


def test_full_blocks_are_shared_and_the_last_is_copied() -> None:
    pool = BlockPool()
    tables = BlockTables(1, 2, pool)
    tables.append([5])
    copies = tables.select([0, 0, 0])
    rows = tables.tensor([0, 1, 2]).tolist()
    assert rows[0][:2] == rows[1][:2] == rows[2][:2]
    assert len({row[2] for row in rows}) == 3
    assert len(copies) == 2
    assert pool.num_used == 5


def test_taking_tokens_off_makes_a_shared_block_a_rows_own() -> None:
    tables = BlockTables(1, 2, BlockPool())
    tables.append([4])
    assert tables.select([0, 0]) == []
    copies = tables.shorten([1, 1])
    first, second = tables.tensor([0, 1]).tolist()
    assert first[0] == second[0]
    assert first[1] != second[1]
    assert len(copies) == 1


def test_what_is_left_of_a_window_is_given_back_once() -> None:
    pool = BlockPool()
    tables = BlockTables(1, 2, pool)
    tables.append([7])
    tables.leave([5])  # positions 0 to 4 are not seen again: blocks 0 and 1 hold only those
    tables.leave([5])
    assert pool.num_used == 2
    assert tables.tensor([0]).tolist()[0][:2] == [0, 0]


@pytest.mark.parametrize(
    ("count", "reach", "expected"), [(0, 3, True), (0, None, False), (1, 2, True), (1, 3, False)]
)
def test_what_a_window_would_show_again(count: int, reach: int | None, expected: bool) -> None:
    tables = BlockTables(1, 2, BlockPool())
    tables.append([7])
    tables.leave([4])  # the first kept position is 4
    assert tables.can_shorten([count], reach) is expected


def test_clearing_gives_everything_back() -> None:
    pool = BlockPool()
    tables = BlockTables(2, 2, pool)
    tables.append([5, 3])
    tables.leave([3, 0])
    tables.select([0, 0])
    tables.clear()
    assert (pool.num_used, tables.lengths) == (0, [0, 0])


class Contents:
    """What would be in the blocks if every token were a number of its own."""

    def __init__(self, batch_size: int, block_size: int) -> None:
        self.pool = BlockPool()
        self.tables = BlockTables(batch_size, block_size, self.pool)
        self.rows: list[list[int]] = [[] for _ in range(batch_size)]
        self.block_size = block_size
        self.blocks: dict[int, list[int]] = {}
        self.next_token = 0

    def append(self, counts: list[int]) -> None:
        counts = [counts[row % len(counts)] for row in range(len(self.rows))]
        before = list(self.tables.lengths)
        self.tables.append(counts)
        table = self.tables.tensor(range(len(self.rows))).tolist()
        for row, count in enumerate(counts):
            for position in range(before[row], before[row] + count):
                block, offset = divmod(position, self.block_size)
                cells = self.blocks.setdefault(table[row][block], [-1] * self.block_size)
                cells[offset] = self.next_token
                self.rows[row].append(self.next_token)
                self.next_token += 1

    def select(self, numbers: list[int]) -> None:
        rows = [number % len(self.rows) for number in numbers]
        self.copy(self.tables.select(rows))
        self.rows = [list(self.rows[row]) for row in rows]

    def shorten(self, counts: list[int]) -> None:
        counts = [
            min(counts[row % len(counts)], len(tokens)) for row, tokens in enumerate(self.rows)
        ]
        self.copy(self.tables.shorten(counts))
        self.rows = [row[: len(row) - n] for row, n in zip(self.rows, counts, strict=True)]

    def copy(self, copies: list[tuple[int, int]]) -> None:
        taken = {target: list(self.blocks[source]) for source, target in copies}
        self.blocks.update(taken)

    def read(self) -> list[list[int]]:
        table = self.tables.tensor(range(len(self.rows))).tolist()
        size = self.block_size
        return [
            [self.blocks[table[row][p // size]][p % size] for p in range(length)]
            for row, length in enumerate(self.tables.lengths)
        ]


NUMBERS = st.lists(st.integers(0, 5), min_size=1, max_size=4)
OPERATIONS = st.lists(st.tuples(st.sampled_from(["append", "select", "shorten"]), NUMBERS))


@settings(max_examples=60, derandomize=True, deadline=None)
@given(batch_size=st.integers(1, 3), block_size=st.integers(1, 4), operations=OPERATIONS)
def test_rows_keep_their_tokens(
    batch_size: int, block_size: int, operations: list[tuple[str, list[int]]]
) -> None:
    contents = Contents(batch_size, block_size)
    for name, numbers in operations:
        run: Callable[[list[int]], None] = getattr(contents, name)
        run(numbers)
        assert contents.read() == contents.rows
    contents.tables.clear()
    assert contents.pool.num_used == 0
