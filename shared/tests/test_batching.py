from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attn_shared.batching import (
    Region,
    check_decodes_first,
    region_of,
    reorder,
    split_decodes_and_prefills,
    split_decodes_extends_and_prefills,
)
from attn_shared.errors import InvalidInputError, MetadataError
from attn_shared.metadata import CommonAttentionMetadata

Row = dict[str, Any]
Oracle = Callable[[str], list[Row]]


def batch(
    query_lens: list[int],
    seq_lens: list[int] | None = None,
    is_prefilling: list[bool] | None = None,
) -> CommonAttentionMetadata:
    return CommonAttentionMetadata.from_lengths(
        query_lens=query_lens,
        seq_lens=query_lens if seq_lens is None else seq_lens,
        is_prefilling=None if is_prefilling is None else torch.tensor(is_prefilling),
    )


def of_row(row: Row) -> CommonAttentionMetadata:
    return batch(row["query_lens"], row["seq_lens"], row["is_prefilling"])


# Where the recorded decisions differ from the contract, and why ours is right.


def uniform_batch_still_prefilling(row: Row) -> bool:
    """Recorded: a uniform batch is all decodes, whatever still prefills.

    A backend that does not count short extends as decodes (recurrent state, for one, starts
    differently) must not be handed them because the lengths happen to be equal.
    """
    lens = row["query_lens"]
    return (
        row["require_uniform"]
        and not row["treat_short_extends_as_decodes"]
        and all(length in (0, lens[0]) for length in lens)
        and lens[0] <= row["decode_threshold"]
        and any(row["is_prefilling"])
    )


def three_way_split_by_length_alone(row: Row) -> bool:
    """Recorded: the three-way split has no such choice; short extends are always decodes.

    Ours has it, as the two-way split does: a short row that still reads its prompt is then an
    extend, or, without earlier keys, a prefill.
    """
    rows = zip(row["query_lens"], row["is_prefilling"], strict=True)
    return not row["treat_short_extends_as_decodes"] and any(
        length <= row["decode_threshold"] and prefills for length, prefills in rows
    )


class TestTwoWaySplit:
    def test_recorded_decisions(self, oracle: Oracle) -> None:
        rows = oracle("split")
        differing = []
        for row in rows:
            ours = split_decodes_and_prefills(
                of_row(row),
                decode_threshold=row["decode_threshold"],
                require_uniform=row["require_uniform"],
                treat_short_extends_as_decodes=row["treat_short_extends_as_decodes"],
            )
            assert all(type(count) is int for count in ours)
            if list(ours) != row["split2"]:
                assert uniform_batch_still_prefilling(row), row
                differing.append(row)
        assert differing, "the rule explains no row"
        assert len(differing) == sum(map(uniform_batch_still_prefilling, rows))

    @pytest.mark.parametrize(
        ("query_lens", "options", "expected"),
        [
            ([], {}, (0, 0, 0, 0)),
            ([1], {}, (1, 0, 1, 0)),
            ([5], {}, (0, 1, 0, 5)),
            ([1, 1, 2, 7], {}, (2, 2, 2, 9)),
            ([1, 1, 2, 7], {"decode_threshold": 2}, (3, 1, 4, 7)),
            ([1, 7, 1], {}, (1, 2, 1, 8)),  # the late decode is served as a prefill
            ([0, 1], {}, (2, 0, 1, 0)),
            ([1, 4, 0], {}, (1, 2, 1, 4)),  # padding at the end goes with the last part
            ([1, 1], {"decode_threshold": 0}, (0, 2, 0, 2)),
            ([3, 3, 0, 3], {"decode_threshold": 4, "require_uniform": True}, (4, 0, 9, 0)),
            ([3, 3, 2, 3], {"decode_threshold": 4, "require_uniform": True}, (2, 2, 6, 5)),
            ([3, 3, 9], {"decode_threshold": 4, "require_uniform": True}, (2, 1, 6, 9)),
            ([9, 9], {"decode_threshold": 4, "require_uniform": True}, (0, 2, 0, 18)),
        ],
    )
    def test_by_hand(
        self, query_lens: list[int], options: dict[str, Any], expected: tuple[int, ...]
    ) -> None:
        assert split_decodes_and_prefills(batch(query_lens), **options) == expected

    @pytest.mark.parametrize("require_uniform", [False, True])
    def test_short_extends_as_prefills(self, require_uniform: bool) -> None:
        common = batch([1, 1, 1, 5], [9, 9, 4, 5], [False, False, True, True])
        split = split_decodes_and_prefills(
            common, require_uniform=require_uniform, treat_short_extends_as_decodes=False
        )
        assert split == (2, 2, 2, 6)

    def test_is_prefilling_is_needed_where_it_is_asked(self) -> None:
        with pytest.raises(MetadataError, match="is_prefilling is None"):
            split_decodes_and_prefills(batch([1]), treat_short_extends_as_decodes=False)

    def test_negative_threshold(self) -> None:
        with pytest.raises(
            InvalidInputError, match="decode_threshold is -1; allowed: an integer >= 0"
        ):
            split_decodes_and_prefills(batch([1]), decode_threshold=-1)


class TestThreeWaySplit:
    def test_recorded_decisions(self, oracle: Oracle) -> None:
        rows = oracle("split")
        differing = []
        for row in rows:
            common, threshold = of_row(row), row["decode_threshold"]
            by_length = split_decodes_extends_and_prefills(common, decode_threshold=threshold)
            assert all(type(count) is int for count in by_length)
            assert list(by_length) == row["split3"], row
            ours = split_decodes_extends_and_prefills(
                common,
                decode_threshold=threshold,
                treat_short_extends_as_decodes=row["treat_short_extends_as_decodes"],
            )
            if list(ours) != row["split3"]:
                assert three_way_split_by_length_alone(row), row
                differing.append(row)
        assert differing, "the rule explains no row"

    @pytest.mark.parametrize(
        ("query_lens", "seq_lens", "expected"),
        [
            ([], [], (0, 0, 0, 0, 0, 0)),
            ([1, 1, 4, 6, 3], [5, 9, 9, 7, 3], (2, 2, 1, 2, 10, 3)),
            ([4, 3], [4, 3], (0, 0, 2, 0, 0, 7)),
            ([4, 3], [9, 9], (0, 2, 0, 0, 7, 0)),
            ([1, 3, 0], [9, 3, 0], (1, 0, 2, 1, 0, 3)),
            ([1, 3, 0], [9, 9, 0], (1, 2, 0, 1, 3, 0)),
            ([1, 4, 1, 3], [9, 9, 1, 3], (1, 2, 1, 1, 5, 3)),
        ],
    )
    def test_by_hand(
        self, query_lens: list[int], seq_lens: list[int], expected: tuple[int, ...]
    ) -> None:
        assert split_decodes_extends_and_prefills(batch(query_lens, seq_lens)) == expected

    def test_short_extends_apart(self) -> None:
        common = batch([1, 1, 4, 1], [9, 5, 8, 1], [False, True, True, True])
        split = split_decodes_extends_and_prefills(common, treat_short_extends_as_decodes=False)
        assert split == (1, 2, 1, 1, 5, 1)

    def test_an_upper_bound_that_is_too_high_makes_an_extend(self) -> None:
        bound = torch.tensor([9, 5], dtype=torch.int32)
        common = batch([1, 4], [8, 4]).with_fields(seq_lens_cpu=bound, seq_lens_cpu_is_exact=False)
        assert split_decodes_extends_and_prefills(common) == (1, 1, 0, 1, 4, 0)

    def test_an_extend_behind_a_prefill_would_lose_its_context(self) -> None:
        with pytest.raises(MetadataError, match=r"row 2 is of 4 query tokens, out of order"):
            split_decodes_extends_and_prefills(batch([1, 3, 4], [9, 3, 9]))

    def test_host_lengths_are_needed(self) -> None:
        with pytest.raises(MetadataError, match="seq_lens_cpu is None"):
            split_decodes_extends_and_prefills(batch([1]).with_fields(seq_lens_cpu=None))


class TestCheckDecodesFirst:
    @pytest.mark.parametrize(
        ("query_lens", "is_prefilling"),
        [
            ([], None),
            ([1, 1, 5, 9], None),
            ([1, 5, 0, 0], None),
            ([5, 1], [True, True]),  # a prompt's last token may stand among prefills
        ],
    )
    def test_accepts(self, query_lens: list[int], is_prefilling: list[bool] | None) -> None:
        check_decodes_first(batch(query_lens, None, is_prefilling))

    @pytest.mark.parametrize("is_prefilling", [None, [False, True, True, False]])
    def test_refuses(self, is_prefilling: list[bool] | None) -> None:
        common = batch([1, 5, 6, 1], [9, 9, 9, 9], is_prefilling)
        with pytest.raises(MetadataError, match=r"row 3 is of 1 query tokens.*decodes \(up to 1"):
            check_decodes_first(common)


def columns_of(rows: list[tuple[int, int, int]]) -> list[list[int]]:
    return [[row[index] for row in rows] for index in range(3)]


class TestReorder:
    def test_recorded_decisions(self, oracle: Oracle) -> None:
        rows = oracle("reorder")
        for row in rows:
            ours = reorder(
                row["num_scheduled"],
                row["num_computed"],
                row["num_prompt"],
                row["decode_threshold"],
            )
            assert list(ours.order) == row["final_order"], row
            assert [list(swap) for swap in ours.swaps] == row["swaps"], row
            assert ours.changed == row["changed"], row
        assert {row["changed"] for row in rows} == {False, True}

    @pytest.mark.parametrize(
        ("row", "region"),
        [
            ((1, 8, 8, 1), Region.DECODE),
            ((2, 8, 8, 1), Region.LONG_EXTEND),
            ((2, 8, 8, 2), Region.DECODE),
            ((1, 7, 8, 1), Region.SHORT_EXTEND),  # reads its prompt's last token
            ((5, 3, 8, 1), Region.LONG_EXTEND),
            ((8, 0, 8, 1), Region.PREFILL),
            ((1, 0, 1, 1), Region.PREFILL),  # a prompt of one token
        ],
    )
    def test_regions(self, row: tuple[int, int, int, int], region: Region) -> None:
        assert region_of(*row) is region

    def test_by_hand(self) -> None:
        # Prefill, decode, long extend, decode: two rows are in a place of their kind and stay.
        ours = reorder([8, 1, 5, 1], [0, 9, 4, 7], [8, 9, 20, 7], 1)
        assert ours.order == (3, 1, 2, 0)
        assert ours.swaps == ((3, 0),)
        assert ours.apply("abcd") == ["d", "b", "c", "a"]

    def test_no_rows(self) -> None:
        ours = reorder([], [], [], 1)
        assert (ours.order, ours.swaps, ours.changed) == ((), (), False)

    def test_lists_of_different_lengths(self) -> None:
        with pytest.raises(InvalidInputError, match=r"of lengths \(2, 1, 2\)"):
            reorder([1, 1], [1], [1, 1], 1)

    @settings(derandomize=True)
    @given(
        rows=st.lists(
            st.tuples(st.integers(1, 6), st.integers(0, 6), st.integers(1, 6)), max_size=12
        ),
        threshold=st.integers(1, 4),
    )
    def test_swaps_lead_to_the_order_and_only_misplaced_rows_move(
        self, rows: list[tuple[int, int, int]], threshold: int
    ) -> None:
        scheduled, computed, prompt = columns_of(rows)
        ours = reorder(scheduled, computed, prompt, threshold)
        swapped = list(range(len(rows)))
        for one, other in ours.swaps:
            swapped[one], swapped[other] = swapped[other], swapped[one]
        assert swapped == list(ours.order)

        regions = [region_of(*row, threshold) for row in rows]
        arranged = ours.apply(regions)
        assert arranged == sorted(regions)
        for place, row in enumerate(ours.order):
            if regions[place] == arranged[place]:
                assert row == place
        again = reorder(ours.apply(scheduled), ours.apply(computed), ours.apply(prompt), threshold)
        assert not again.changed

    @settings(derandomize=True)
    @given(
        rows=st.lists(
            st.tuples(st.integers(1, 6), st.integers(0, 6), st.integers(1, 6)), max_size=12
        ),
        threshold=st.integers(1, 4),
    )
    def test_a_reordered_batch_passes_every_check(
        self, rows: list[tuple[int, int, int]], threshold: int
    ) -> None:
        columns = columns_of(rows)
        ours = reorder(columns[0], columns[1], columns[2], threshold)
        scheduled, computed, prompt = (ours.apply(column) for column in columns)
        common = batch(
            scheduled,
            [new + old for new, old in zip(scheduled, computed, strict=True)],
            [old < total for old, total in zip(computed, prompt, strict=True)] or None,
        )
        check_decodes_first(common, decode_threshold=threshold)
        split_decodes_extends_and_prefills(common, decode_threshold=threshold)
        two = split_decodes_and_prefills(common, decode_threshold=threshold)
        assert two.num_decodes + two.num_prefills == len(rows)
        assert two.num_decode_tokens == sum(scheduled[: two.num_decodes])
        assert two.num_decode_tokens + two.num_prefill_tokens == sum(scheduled)
        if common.is_prefilling is not None:
            exact = split_decodes_and_prefills(
                common, decode_threshold=threshold, treat_short_extends_as_decodes=False
            )
            decodes = [region_of(*row, threshold) for row in rows].count(Region.DECODE)
            assert exact.num_decodes >= decodes
