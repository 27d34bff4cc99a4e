from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attn_shared.errors import InvalidInputError, MetadataError, UnsupportedOptionError
from attn_shared.local_attention import make_local_attention_virtual_batches
from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.reference import AttentionOptions, paged_attention

HEADS, WIDTH = 2, 4


def batch(
    query_lens: list[int], seq_lens: list[int], table: list[list[int]], block_size: int
) -> CommonAttentionMetadata:
    return CommonAttentionMetadata.from_lengths(
        query_lens=query_lens,
        seq_lens=seq_lens,
        block_table=torch.tensor(table, dtype=torch.int32),
        block_size=block_size,
    )


def small(**changes: Any) -> CommonAttentionMetadata:
    return batch([2], [5], [[1, 2, 3]], 2).with_fields(**changes)


class TestByHand:
    def test_chunks_of_four_in_blocks_of_two(self) -> None:
        # Positions 3..8 of 9 keys: chunk 0 has one query, chunk 1 four, chunk 2 one.
        # The second request decodes at position 5, inside chunk 1.
        common = batch([6, 1], [9, 6], [[10, 11, 12, 13, 14], [20, 21, 22, -7, -7]], 2)
        virtual = make_local_attention_virtual_batches(common, 4, 2)
        assert virtual.query_start_loc.tolist() == [0, 1, 5, 6, 7]
        assert virtual.query_start_loc_cpu.tolist() == [0, 1, 5, 6, 7]
        assert virtual.seq_lens.tolist() == [4, 4, 1, 2]
        assert virtual.exact_seq_lens_cpu.tolist() == [4, 4, 1, 2]
        assert virtual.block_table is not None
        # Block 14 is the first row's last; block 22 the second's. What lies past is not named.
        assert virtual.block_table.tolist() == [[10, 11], [12, 13], [14, 14], [22, 22]]
        assert (virtual.num_reqs, virtual.num_actual_tokens) == (4, 7)
        assert (virtual.max_query_len, virtual.max_seq_len) == (4, 4)
        assert virtual.slot_mapping is common.slot_mapping

    def test_padded_rows_stay(self) -> None:
        common = batch([1, 1, 0, 0], [3, 0, 0, 4], [[1, 2], [0, 0], [0, 0], [5, 6]], 2)
        virtual = make_local_attention_virtual_batches(common, 2, 2)
        assert virtual.query_start_loc.tolist() == [0, 1, 2, 2, 2]
        assert virtual.seq_lens.tolist() == [1, 0, 0, 0]

    def test_a_prefilling_request_stays_one_in_every_part(self) -> None:
        common = batch([4, 1], [4, 1], [[1, 2], [3, 0]], 2)
        common = common.with_fields(is_prefilling=torch.tensor([True, False]))
        virtual = make_local_attention_virtual_batches(common, 2, 2)
        assert virtual.is_prefilling is not None
        assert virtual.is_prefilling.tolist() == [True, True, False]

    def test_empty_batch_and_table_without_columns(self) -> None:
        empty = CommonAttentionMetadata.from_lengths(
            query_lens=[], seq_lens=[], block_table=torch.zeros(0, 2)
        )
        assert make_local_attention_virtual_batches(empty, 4, 2).num_reqs == 0
        padded = CommonAttentionMetadata.from_lengths(
            query_lens=[0], seq_lens=[0], block_table=torch.zeros(1, 0)
        )
        virtual = make_local_attention_virtual_batches(padded, 4, 2)
        assert virtual.block_table is not None
        assert virtual.block_table.tolist() == [[0, 0]]


class TestRefusals:
    @pytest.mark.parametrize(("chunk", "block"), [(3, 2), (5, 4)])
    def test_chunks_that_are_not_whole_blocks(self, chunk: int, block: int) -> None:
        with pytest.raises(InvalidInputError, match=f"chunk_size is {chunk}; allowed: a multiple"):
            make_local_attention_virtual_batches(small(), chunk, block)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"causal": False}, "not causal"),
            (
                {"causal": torch.tensor([False]), "causal_cpu": torch.tensor([False])},
                "not causal",
            ),
            ({"mm_prefix_ranges": {0: [(0, 1)]}}, "multimodal ranges"),
            ({"encoder_seq_lens": torch.tensor([3], dtype=torch.int32)}, "encoder_seq_lens"),
            ({"dcp_local_seq_lens": torch.tensor([3], dtype=torch.int32)}, "dcp_local_seq_lens"),
        ],
    )
    def test_what_chunks_have_no_rule_for(self, changes: dict[str, Any], message: str) -> None:
        with pytest.raises(UnsupportedOptionError, match=message):
            make_local_attention_virtual_batches(small(**changes), 4, 2)

    def test_a_causal_tensor_is_served(self) -> None:
        rows = torch.tensor([True])
        virtual = make_local_attention_virtual_batches(small(causal=rows, causal_cpu=rows), 2, 2)
        assert virtual.causal is True

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"block_table": None}, "block_table is None"),
            ({"seq_lens_cpu_is_exact": False}, "seq_lens_cpu is an upper bound"),
            (
                {"seq_lens_cpu": torch.tensor([1], dtype=torch.int32)},
                r"seq_lens\[0\] is 1; allowed: 2 \(the query length\) to 6",
            ),
            (
                {"seq_lens_cpu": torch.tensor([7], dtype=torch.int32), "max_seq_len": 7},
                r"seq_lens\[0\] is 7; allowed: .* to 6 \(the table's row\)",
            ),
        ],
    )
    def test_lengths(self, changes: dict[str, Any], message: str) -> None:
        with pytest.raises(MetadataError, match=message):
            make_local_attention_virtual_batches(small(**changes), 4, 2)


REQUEST = st.tuples(st.integers(0, 7), st.integers(0, 17))


@settings(derandomize=True, max_examples=60)
@given(
    requests=st.lists(REQUEST, min_size=1, max_size=4),
    block_size=st.integers(1, 4),
    blocks_per_chunk=st.integers(1, 3),
    seed=st.integers(0, 999),
)
def test_equals_the_reference_of_chunked_attention(
    requests: list[tuple[int, int]], block_size: int, blocks_per_chunk: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    seq_lens = [new + old if new else 0 for new, old in requests]
    used = [-(-length // block_size) for length in seq_lens]
    width, num_blocks = max(1, *used), max(1, sum(used))
    ids = iter(torch.randperm(num_blocks, generator=generator).tolist())
    poison = 10**6  # an id of no block: naming it past the used entries must do no harm
    table = [[next(ids) for _ in range(n)] + [poison] * (width - n) for n in used]
    common = batch([new for new, _ in requests], seq_lens, table, block_size)

    shape = (num_blocks, block_size, HEADS, WIDTH)
    key = torch.randn(shape, generator=generator, dtype=torch.float64)
    value = torch.randn(shape, generator=generator, dtype=torch.float64)
    query = torch.randn(
        common.num_actual_tokens, HEADS, WIDTH, generator=generator, dtype=torch.float64
    )
    chunk_size = blocks_per_chunk * block_size
    virtual = make_local_attention_virtual_batches(common, chunk_size, block_size)

    results = [
        paged_attention(
            query,
            key,
            value,
            AttentionOptions(scale=0.5, chunk_size=chunk),
            query_start_loc=described.query_start_loc,
            seq_lens=described.seq_lens,
            block_table=described.block_table,
        )
        for described, chunk in ((common, chunk_size), (virtual, None))
        if described.block_table is not None
    ]
    torch.testing.assert_close(results[1].output, results[0].output, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(results[1].lse, results[0].lse, rtol=1e-12, atol=1e-12)
    assert virtual.max_seq_len <= chunk_size
    assert virtual.block_table is not None
    assert virtual.block_table.shape == (virtual.num_reqs, blocks_per_chunk)
