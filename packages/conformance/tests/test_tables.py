from __future__ import annotations

from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attn_conformance._tables import Placement, place
from attn_conformance.case import Case, TableStyle


def placed(case: Case, block_elements: int = 1) -> Placement:
    return place(case, torch.Generator().manual_seed(0), block_elements=block_elements)


def rows_of(case: Case, placement: Placement) -> list[list[int]]:
    counts = [-(-length // case.block_size) for length in case.seq_lens]
    return [row[:n] for row, n in zip(placement.table.tolist(), counts, strict=True)]


def test_every_row_has_blocks_of_its_own_and_ends_in_garbage() -> None:
    case = Case(name="c", query_lens=(1, 2), seq_lens=(9, 3))
    placement = placed(case)
    rows = rows_of(case, placement)
    used = list(chain(*rows))
    assert [len(row) for row in rows] == [3, 1]
    assert len(set(used)) == 4
    for row, own in zip(placement.table.tolist(), rows, strict=True):
        tail = row[len(own) :]
        assert len(tail) >= 2
        assert not set(tail) & set(used)
        assert any(not 0 <= block < placement.num_blocks for block in tail)


def test_two_blocks_are_nobodys() -> None:
    case = Case(name="c", query_lens=(1, 2), seq_lens=(9, 3))
    placement = placed(case)
    assert placement.num_blocks == 6
    assert set(placement.block_ids) == set(range(6))


def test_ordered_begins_at_block_zero() -> None:
    case = Case(name="c", query_lens=(1, 2), seq_lens=(9, 3), table=TableStyle.ORDERED)
    assert rows_of(case, placed(case)) == [[0, 1, 2], [3]]


def test_shared_prefix_is_what_no_row_writes() -> None:
    case = Case(name="c", query_lens=(1, 2), seq_lens=(13, 11), table=TableStyle.SHARED_PREFIX)
    first, second = rows_of(case, placed(case))
    assert first[:2] == second[:2]  # 9 computed tokens of the shorter: two whole blocks of 4
    assert not set(first[2:]) & set(second[2:])


def test_common_prefix_is_shared_whatever_the_style() -> None:
    case = Case(name="c", query_lens=(1, 1), seq_lens=(13, 12), common_prefix_len=4)
    first, second = rows_of(case, placed(case))
    assert first[0] == second[0]
    assert not set(first[1:]) & set(second[1:])


def test_repeated_blocks_come_from_two_and_are_never_written() -> None:
    case = Case(name="c", query_lens=(3,), seq_lens=(30,), table=TableStyle.REPEATED)
    placement = placed(case)
    (row,) = rows_of(case, placement)
    assert len(set(row[:6])) <= 2  # 27 computed tokens: six whole blocks
    assert not set(row[:6]) & {slot // 4 for slot in placement.new_slots}


def test_freed_blocks_are_wholly_left_of_the_window() -> None:
    fields = {"window": (3, 0), "table": TableStyle.FREED_LEFT}
    case = Case(name="c", query_lens=(1,), seq_lens=(20,), **fields)  # type: ignore[arg-type]
    (row,) = rows_of(case, placed(case))
    # The query at 19 sees 16 to 19: blocks 0 to 3 of five are freed.
    assert len(set(row[:4])) == 1
    assert row[4] != row[0]


def test_new_slots_follow_the_batch_and_padding_has_none() -> None:
    case = Case(name="c", query_lens=(1, 2, 2), seq_lens=(5, 2, 0), table=TableStyle.ORDERED)
    # Row 0 has blocks 0 and 1: position 4 is slot 4. Row 1 has block 2: slots 8 and 9.
    assert placed(case).new_slots == (4, 8, 9, -1, -1)


def test_a_span_of_elements_puts_the_blocks_at_its_end() -> None:
    case = Case(name="c", query_lens=(1,), seq_lens=(5,), cache_elements=1000)
    placement = placed(case, block_elements=10)
    assert min(placement.block_ids) >= 100
    assert placement.num_blocks == 104


@given(
    lens=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 30)), min_size=1, max_size=5),
    style=st.sampled_from(TableStyle),
    block_size=st.integers(1, 5),
)
def test_no_slot_is_written_twice_and_each_written_one_is_live(
    lens: list[tuple[int, int]], style: TableStyle, block_size: int
) -> None:
    case = Case(
        name="c",
        query_lens=tuple(new for new, _ in lens),
        seq_lens=tuple(new + old for new, old in lens),
        table=style,
        block_size=block_size,
        window=(2, 0),
    )
    placement = placed(case)
    assert len(set(placement.new_slots)) == len(placement.new_slots)
    assert set(placement.new_slots) <= set(placement.live_slots)


@pytest.mark.parametrize("style", list(TableStyle))
def test_an_empty_batch_has_an_empty_table(style: TableStyle) -> None:
    case = Case(name="c", query_lens=(), seq_lens=(), table=style)
    assert placed(case).table.shape[0] == 0
