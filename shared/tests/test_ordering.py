"""Moving whole requests of a batch."""

from __future__ import annotations

import torch

from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.ordering import ordered, permuted


def batch() -> CommonAttentionMetadata:
    """Return a prefill of 3 tokens, a decode, and a short extend of 2 at the end of its prompt."""
    flags = torch.tensor([True, False, True])
    return CommonAttentionMetadata.from_lengths(
        query_lens=[3, 1, 2],
        seq_lens=[3, 9, 6],
        block_table=torch.tensor([[0, 1, 2], [3, 4, 5], [6, 7, 8]]),
        block_size=4,
        is_prefilling=torch.tensor([True, False, True]),
        causal=flags,
        causal_cpu=flags,
        mm_prefix_ranges={0: [(0, 1)], 2: [(4, 5)]},
        positions=torch.tensor([0, 1, 2, 8, 4, 5]),
    )


def test_decodes_come_first_and_nothing_is_dropped() -> None:
    moved, order = ordered(batch(), 1)
    assert order is not None
    assert order.tolist() == [3, 0, 1, 2, 4, 5] or order.tolist() == [3, 4, 5, 0, 1, 2]
    assert moved.seq_lens.tolist()[0] == 9
    assert moved.causal_cpu is not None
    assert not moved.causal_cpu[0]


def test_every_field_moves_with_its_request() -> None:
    moved, order = permuted(batch(), [1, 2, 0])
    assert order.tolist() == [3, 4, 5, 0, 1, 2]
    assert moved.query_start_loc.tolist() == [0, 1, 3, 6]
    assert moved.query_start_loc_cpu.tolist() == [0, 1, 3, 6]
    assert moved.seq_lens.tolist() == [9, 6, 3]
    assert moved.block_table is not None
    assert moved.block_table[:, 0].tolist() == [3, 6, 0]
    assert moved.slot_mapping is not None
    assert moved.slot_mapping.tolist() == [20, 28, 29, 0, 1, 2]
    assert moved.positions is not None
    assert moved.positions.tolist() == [8, 4, 5, 0, 1, 2]
    assert moved.is_prefilling is not None
    assert moved.is_prefilling.tolist() == [False, True, True]
    assert isinstance(moved.causal, torch.Tensor)
    assert moved.causal.tolist() == [False, True, True]
    assert moved.mm_prefix_ranges == {1: [(4, 5)], 2: [(0, 1)]}


def test_the_slots_of_encoder_tokens_stay_where_they_are() -> None:
    lens = torch.tensor([2, 1], dtype=torch.int32)
    common = CommonAttentionMetadata.from_lengths(
        query_lens=[2, 1],
        seq_lens=[2, 4],
        block_table=torch.tensor([[3], [5]]),
        encoder_seq_lens=lens,
        encoder_seq_lens_cpu=lens,
        slot_mapping=torch.tensor([12, 13, 20]),
    )
    moved, _ = permuted(common, [1, 0])
    assert moved.slot_mapping is not None
    assert moved.slot_mapping.tolist() == [12, 13, 20]
    assert moved.encoder_seq_lens is not None
    assert moved.encoder_seq_lens.tolist() == [1, 2]


def test_an_ordered_batch_is_left_alone() -> None:
    common = CommonAttentionMetadata.from_lengths(query_lens=[1, 5], seq_lens=[4, 5])
    assert ordered(common, 1) == (common, None)
