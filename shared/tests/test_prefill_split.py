"""Which rank computes which tokens of a step."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attn_shared.errors import InvalidInputError
from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.prefill_split import Piece, pieces_of, split_batch


def batch(query_lens: list[int], seq_lens: list[int], **options: object) -> CommonAttentionMetadata:
    return CommonAttentionMetadata.from_lengths(
        query_lens=query_lens,
        seq_lens=seq_lens,
        block_table=torch.arange(4 * len(seq_lens)).view(len(seq_lens), 4),
        block_size=4,
        **options,
    )


class TestPieces:
    def test_head_and_tail_by_hand(self) -> None:
        # 8 tokens, two ranks: pieces of two, of which rank 0 has the first and the last.
        assert pieces_of([8], 2) == [[Piece(0, 0, 2), Piece(0, 6, 8)], [Piece(0, 2, 6)]]

    def test_short_requests_go_around_each_from_another_rank(self) -> None:
        assert pieces_of([1, 1, 2], 2) == [
            [Piece(0, 0, 1), Piece(2, 0, 1)],
            [Piece(1, 0, 1), Piece(2, 1, 2)],
        ]

    def test_one_rank_has_everything(self) -> None:
        assert pieces_of([5, 0, 1], 1) == [[Piece(0, 0, 5), Piece(2, 0, 1)]]

    @settings(derandomize=True)
    @given(lens=st.lists(st.integers(0, 50), max_size=5), world_size=st.integers(1, 5))
    def test_each_token_has_one_rank(self, lens: list[int], world_size: int) -> None:
        found = sorted(
            (piece.request, token)
            for pieces in pieces_of(lens, world_size)
            for piece in pieces
            for token in range(piece.start, piece.stop)
        )
        assert found == [(request, token) for request, n in enumerate(lens) for token in range(n)]

    @pytest.mark.parametrize("world_size", [2, 3, 4, 8])
    def test_causal_work_is_balanced(self, world_size: int) -> None:
        # A row at position p sees p + 1 keys; 2 * W even pieces give each rank the same sum.
        length = 2 * world_size * 16
        work = [
            sum(token + 1 for piece in pieces for token in range(piece.start, piece.stop))
            for pieces in pieces_of([length], world_size)
        ]
        assert set(work) == {length * (length + 1) // 2 // world_size}

    @pytest.mark.parametrize(
        ("lens", "world_size", "words"),
        [([3], 0, "world_size is 0"), ([3, -1], 2, r"query_lens\[1\] is -1")],
    )
    def test_refuses(self, lens: list[int], world_size: int, words: str) -> None:
        with pytest.raises(InvalidInputError, match=words):
            pieces_of(lens, world_size)


class TestSplitBatch:
    def test_a_piece_is_a_request_of_the_keys_up_to_its_end(self) -> None:
        common = batch([8, 1], [10, 5])
        first, second = (split_batch(common, 2, rank) for rank in (0, 1))
        # Request 0 begins at position 2: its tokens 0 1 end at key 4, 6 7 at key 10, 2..5 at 8.
        assert first.common.query_start_loc.tolist() == [0, 2, 4]
        assert first.common.seq_lens.tolist() == [4, 10]
        assert second.common.query_start_loc.tolist() == [0, 4, 5]
        assert second.common.seq_lens.tolist() == [8, 5]
        assert second.common.block_table is not None
        assert second.common.block_table.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
        assert first.rows.tolist() == [0, 1, 6, 7]
        assert second.rows.tolist() == [2, 3, 4, 5, 8]
        assert first.common.slot_mapping is None
        assert first.most == second.most == 5

    def test_the_order_puts_gathered_rows_back(self) -> None:
        common = batch([8, 1, 3], [10, 5, 3])
        splits = [split_batch(common, 3, rank) for rank in range(3)]
        gathered = torch.full((3, splits[0].most), -1)
        for rank, split in enumerate(splits):
            gathered[rank, : len(split.rows)] = split.rows
        assert gathered.flatten()[splits[0].order].tolist() == list(range(12))

    def test_rows_without_a_causal_mask_see_every_key(self) -> None:
        flags = torch.tensor([False, True])
        common = batch([8, 8], [10, 10], causal=flags, causal_cpu=flags)
        split = split_batch(common, 2, 0)
        assert split.common.seq_lens.tolist() == [10, 10, 4, 10]
        assert isinstance(split.common.causal, torch.Tensor)
        assert split.common.causal.tolist() == [False, False, True, True]
        plain = split_batch(common.with_fields(causal=False, causal_cpu=None), 2, 1)
        assert plain.common.causal is False
        assert plain.common.seq_lens.tolist() == [10, 10]

    def test_a_padded_row_stays_one(self) -> None:
        split = split_batch(batch([1, 1], [0, 3]), 2, 0)
        assert split.common.seq_lens.tolist() == [0]

    def test_a_bound_of_lengths_stays_a_bound(self) -> None:
        common = batch([4], [9])
        bound = common.with_fields(
            seq_lens_cpu=torch.tensor([12], dtype=torch.int32), seq_lens_cpu_is_exact=False
        )
        split = split_batch(bound, 2, 0)
        assert split.common.seq_lens.tolist() == [6, 9]
        assert split.common.seq_lens_cpu is not None
        assert split.common.seq_lens_cpu.tolist() == [9, 12]
        assert not split.common.seq_lens_cpu_is_exact
