from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attn_shared.cascade import check_cascade, common_prefix_len, use_cascade
from attn_shared.errors import InvalidInputError, MetadataError, UnsupportedOptionError
from attn_shared.metadata import CommonAttentionMetadata

Oracle = Callable[[str], list[dict[str, Any]]]

TABLE = [[1, 2, 3, 8], [1, 2, 3, 9], [1, 2, 4, 0]]  # two blocks in common


def batch(**changes: Any) -> CommonAttentionMetadata:
    """Three decodes over blocks of 4: 12, 13 and 8 keys before this step."""
    common = CommonAttentionMetadata.from_lengths(
        query_lens=[1, 2, 1],
        seq_lens=[13, 15, 9],
        block_table=torch.tensor(TABLE),
        block_size=4,
    )
    return common.with_fields(**changes)


class TestCommonPrefixLen:
    @pytest.mark.parametrize(
        ("table", "num_computed", "expected"),
        [
            (TABLE, [12, 13, 8], 8),
            (TABLE[:2], [12, 13], 12),
            (TABLE[:2], [11, 13], 8),  # block 3 is not yet full when the step begins
            (TABLE[:2], [3, 13], 0),
            (TABLE[:2], [0, 13], 0),
            ([[1, 2], [2, 1]], [8, 8], 0),
            ([[1, 7, 3], [1, 2, 3]], [12, 12], 4),  # equal again further on: not a prefix
            ([[0, 0], [0, 0]], [8, 8], 8),  # block 0 is an ordinary block
            (TABLE[:1], [16], 16),
            ([[1, 2], [1, 2]], [99, 99], 8),  # never past the table
        ],
    )
    def test_by_hand(self, table: list[list[int]], num_computed: list[int], expected: int) -> None:
        assert common_prefix_len(torch.tensor(table), num_computed, 4) == expected

    def test_no_requests(self) -> None:
        assert common_prefix_len(torch.zeros(0, 4, dtype=torch.int32), [], 4) == 0

    @pytest.mark.parametrize(
        ("num_computed", "block_size", "message"),
        [
            ([1], 4, r"block_table shape is \(3, 4\); allowed: \(1, any\)"),
            ([1, -1, 1], 4, "num_computed is -1"),
            ([1, 1, 1], 0, "block_size is 0"),
        ],
    )
    def test_refuses(self, num_computed: list[int], block_size: int, message: str) -> None:
        with pytest.raises(InvalidInputError, match=message):
            common_prefix_len(torch.tensor(TABLE), num_computed, block_size)


class TestCheckCascade:
    @pytest.mark.parametrize("prefix", [0, 4, 8])
    def test_accepts(self, prefix: int) -> None:
        check_cascade(batch(), prefix, block_size=4)

    @pytest.mark.parametrize(
        ("prefix", "message"),
        [
            (6, "common_prefix_len is 6; allowed: multiples of block_size=4"),
            (-4, "common_prefix_len is -4"),
            (12, r"common_prefix_len is 12; allowed: at most min\(seq_len - query_len\) = 8"),
        ],
    )
    def test_refuses_lengths(self, prefix: int, message: str) -> None:
        with pytest.raises(MetadataError, match=message):
            check_cascade(batch(), prefix, block_size=4)

    def test_refuses_rows_that_differ(self) -> None:
        table = torch.tensor([[1, 2], [1, 2], [1, 5]], dtype=torch.int32)
        with pytest.raises(MetadataError, match="at most 4: the rows of block_table differ at 1"):
            check_cascade(batch(block_table=table), 8, block_size=4)

    def test_refuses_more_blocks_than_the_table_has(self) -> None:
        table = torch.ones(3, 1, dtype=torch.int32)
        with pytest.raises(MetadataError, match="at most 1 blocks"):
            check_cascade(batch(block_table=table), 8, block_size=4)

    def test_refuses_a_block_size_of_zero(self) -> None:
        with pytest.raises(InvalidInputError, match="block_size is 0"):
            check_cascade(batch(), 4, block_size=0)

    def test_refuses_rows_that_are_not_causal(self) -> None:
        with pytest.raises(MetadataError, match="causal is False; allowed: True for all rows"):
            check_cascade(batch(causal=False), 4, block_size=4)
        rows = torch.tensor([True, False, True])
        with pytest.raises(MetadataError, match=r"causal is False for rows \[1\]"):
            check_cascade(batch(causal=rows, causal_cpu=rows), 4, block_size=4)
        check_cascade(batch(causal=rows | True, causal_cpu=rows | True), 4, block_size=4)

    def test_refuses_what_it_cannot_judge(self) -> None:
        with pytest.raises(MetadataError, match="seq_lens_cpu is an upper bound"):
            check_cascade(batch(seq_lens_cpu_is_exact=False), 4, block_size=4)
        with pytest.raises(MetadataError, match="block_table is None"):
            check_cascade(batch(block_table=None), 4, block_size=4)
        lens = torch.tensor([7, 8, 5], dtype=torch.int32)
        with pytest.raises(UnsupportedOptionError, match="sharded over ranks"):
            check_cascade(batch(dcp_local_seq_lens=lens), 4, block_size=4)

    @settings(derandomize=True, max_examples=60)
    @given(
        rows=st.lists(
            st.tuples(
                st.lists(st.integers(0, 1), min_size=3, max_size=3),
                st.integers(0, 12),
                st.integers(0, 3),
            ),
            min_size=1,
            max_size=4,
        ),
        block_size=st.integers(1, 4),
    )
    def test_the_common_prefix_is_the_longest_that_passes(
        self, rows: list[tuple[list[int], int, int]], block_size: int
    ) -> None:
        computed = [min(keys, 3 * block_size) for _, keys, _ in rows]
        common = CommonAttentionMetadata.from_lengths(
            query_lens=[new for _, _, new in rows],
            seq_lens=[keys + new for keys, (_, _, new) in zip(computed, rows, strict=True)],
        ).with_fields(block_table=torch.tensor([row for row, _, _ in rows], dtype=torch.int32))
        assert common.block_table is not None
        longest = common_prefix_len(common.block_table, computed, block_size)
        check_cascade(common, longest, block_size=block_size)
        with pytest.raises(MetadataError, match="common_prefix_len"):
            check_cascade(common, longest + block_size, block_size=block_size)


class TestUseCascade:
    def test_recorded_decisions(self, oracle: Oracle) -> None:
        rows = oracle("cascade")
        for row in rows:
            ours = use_cascade(
                common_prefix_len=row["common_prefix_len"],
                query_lens=row["query_lens"],
                num_heads=row["num_query_heads"],
                num_kv_heads=row["num_kv_heads"],
                num_compute_units=row["num_sms"],
                has_alibi=row["use_alibi"],
                has_window=row["use_sliding_window"],
                has_chunks=row["use_local_attention"],
                dcp_size=row["dcp_world_size"],
            )
            assert ours is row["cascade"], row
        assert {row["cascade"] for row in rows} == {False, True}

    def test_cost_by_hand(self) -> None:
        # 2 key tiles. Cascade: 32 heads on 100 units, one wave of 2 tiles: 2. Plain: 8 requests
        # on 8 kv heads and 2 tiles are 128 units of work on 100: 2. Not less, so no.
        def pays(num_reqs: int) -> bool:
            return use_cascade(
                common_prefix_len=256,
                query_lens=[1] * num_reqs,
                num_heads=32,
                num_kv_heads=8,
                num_compute_units=100,
            )

        assert not pays(8)
        # 13 requests: 208 units of work on 100 units are 3 waves.
        assert pays(13)
