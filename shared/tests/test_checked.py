from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attn_shared.checked import blocks_at_most, blocks_needed, check_metadata
from attn_shared.errors import MetadataError
from attn_shared.kv_cache import FullAttentionSpec, MambaSpec, MLAAttentionSpec
from attn_shared.metadata import CommonAttentionMetadata

SPEC = FullAttentionSpec(
    block_size=4, num_kv_heads=1, head_size=8, head_size_v=8, dtype=torch.float32
)
NUM_BLOCKS = 10
LONG = torch.tensor([4])


def i32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def batch(**changes: Any) -> CommonAttentionMetadata:
    """Three requests and a padded row; the entries that are not read name no block."""
    common = CommonAttentionMetadata.from_lengths(
        query_lens=[2, 1, 3, 0],
        seq_lens=[5, 1, 3, 0],
        block_table=torch.tensor([[1, 2], [3, -9], [4, 99], [-9, 99]]),
        block_size=4,
    )
    return common.with_fields(**changes)


def check(common: CommonAttentionMetadata) -> None:
    check_metadata(common, spec=SPEC, num_blocks=NUM_BLOCKS)


class TestAccepts:
    def test_a_sound_batch(self) -> None:
        check(batch())
        check_metadata(batch())

    def test_an_empty_batch(self) -> None:
        table = torch.zeros(0, 3)
        check(
            CommonAttentionMetadata.from_lengths(
                query_lens=[], seq_lens=[], block_table=table, block_size=4
            )
        )

    @pytest.mark.parametrize(
        "changes",
        [
            {"max_query_len": 7, "max_seq_len": 99},  # bounds may be loose
            {"seq_lens_cpu": i32(6, 2, 3, 0), "seq_lens_cpu_is_exact": False},
            {"seq_lens_cpu": None},
            {"slot_mapping": torch.tensor([-1, -1, -1, -1, -1, 18])},
            {"slot_mapping": torch.tensor([7, 8, 12, 16, 17, 18, -1, -1])},  # padded for a graph
            {"slot_mapping": None},
            {"block_table": None, "slot_mapping": None},
            {"causal": False},
            {"causal": torch.ones(4).bool(), "causal_cpu": torch.ones(4).bool()},
            {"mm_prefix_ranges": {0: [(0, 2), (3, 4)], 2: [(1, 1)], 1: []}},
            {"dcp_local_seq_lens": i32(3, 1, 0, 0), "dcp_local_seq_lens_cpu": i32(3, 1, 1, 0)},
        ],
    )
    def test_what_is_allowed(self, changes: dict[str, Any]) -> None:
        check(batch(**changes))

    def test_cross_attention(self) -> None:
        # The encoder's lengths say what the table is read for; slots belong to encoder tokens.
        lens = i32(8, 0, 4, 0)
        common = batch(
            encoder_seq_lens=lens,
            encoder_seq_lens_cpu=lens,
            seq_lens=i32(1, 1, 40, 0),
            seq_lens_cpu=None,
            max_seq_len=40,
            slot_mapping=torch.tensor([4, 5, 6]),
        )
        check(common)

    def test_keys_of_their_own_length(self) -> None:
        starts = i32(0, 1, 1, 2, 2)
        common = CommonAttentionMetadata.from_lengths(
            query_lens=[2, 1, 3, 0],
            seq_lens=[1, 0, 1, 0],
            key_start_loc=starts,
            key_start_loc_cpu=starts,
            causal=False,
        )
        check_metadata(common)

    def test_sharded_sequences_read_only_their_share_of_the_table(self) -> None:
        common = batch(
            seq_lens=i32(16, 1, 3, 0),
            seq_lens_cpu=None,
            max_seq_len=16,
            dcp_local_seq_lens=i32(8, 1, 2, 0),
        )
        check(common)

    def test_latents_and_recurrent_states(self) -> None:
        latent = MLAAttentionSpec(block_size=4, head_size=8, kv_lora_rank=6, dtype=torch.float32)
        check_metadata(batch(), spec=latent, num_blocks=NUM_BLOCKS)
        state = MambaSpec(block_size=1, shapes=((2,),), dtypes=(torch.float32,))
        check_metadata(batch(), spec=state, num_blocks=NUM_BLOCKS)


class TestRefuses:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            (
                {"query_start_loc_cpu": i32(1, 2, 3, 6, 6)},
                r"query_start_loc\[0\] is 1; allowed: 0, where the first request begins",
            ),
            (
                {"query_start_loc_cpu": i32(0, 2, 1, 6, 6), "max_query_len": 5},
                r"query_start_loc\[2\] is 1; allowed: at least 2, the entry before it",
            ),
            (
                {"query_start_loc_cpu": i32(0, 2, 4, 6, 6)},
                r"query_start_loc_cpu\[2\] is 4; allowed: 3, which query_start_loc holds",
            ),
            (
                {"seq_lens_cpu": i32(5, 2, 3, 0)},
                r"seq_lens_cpu\[1\] is 2; allowed: 1, which seq_lens holds",
            ),
            (
                {"seq_lens_cpu": i32(9, 9, 2, 9), "seq_lens_cpu_is_exact": False},
                r"seq_lens_cpu\[2\] is 2; allowed: at least 3",
            ),
            (
                {
                    "causal": torch.tensor([True, False, True, True]),
                    "causal_cpu": torch.tensor([True, True, True, True]),
                },
                r"causal_cpu\[1\] is True; allowed: False",
            ),
            (
                {"key_start_loc": i32(0, 1, 2, 3, 4), "key_start_loc_cpu": i32(0, 1, 0, 3, 4)},
                r"key_start_loc\[2\] is 0; allowed: at least 1",
            ),
            (
                {"num_actual_tokens": 5},
                r"num_actual_tokens is 5; allowed: query_start_loc\[-1\] = 6",
            ),
            (
                {"max_query_len": 2},
                "max_query_len is 2; allowed: at least 3, the query length of request 2",
            ),
            ({"max_seq_len": 4}, "max_seq_len is 4; allowed: at least 5, the seq_len of request 0"),
            (
                {"slot_mapping": torch.tensor([7, 8])},
                "slot_mapping length is 2; allowed: at least 6",
            ),
            ({"positions": torch.tensor([3])}, "positions length is 1; allowed: at least 6"),
            (
                {"seq_lens": i32(5, 1, 2, 0), "seq_lens_cpu": None},
                r"seq_lens\[2\] is 2; allowed: at least 3, the request's query length, or 0",
            ),
            ({"seq_lens": i32(5, 1, 3, -1), "seq_lens_cpu": None}, r"seq_lens\[3\] is -1"),
            ({"encoder_seq_lens": i32(1, -2, 1, 1)}, r"encoder_seq_lens\[1\] is -2; allowed: >= 0"),
            (
                {"dcp_local_seq_lens": i32(3, 2, 1, 0)},
                r"dcp_local_seq_lens\[1\] is 2; allowed: 0 to 1, the seq_len",
            ),
            (
                {"dcp_local_seq_lens": i32(3, 1, 1, 0), "dcp_local_seq_lens_cpu": i32(2, 1, 1, 0)},
                r"dcp_local_seq_lens_cpu\[0\] is 2; allowed: at least 3",
            ),
            (
                {"seq_lens": i32(9, 1, 3, 0), "seq_lens_cpu": None, "max_seq_len": 9},
                r"seq_lens\[0\] is 9; allowed: at most 8: block_table has 2 blocks of 4 per row",
            ),
            (
                {"block_table": i32(1, 10, 3, 0, 4, 0, 0, 0).view(4, 2)},
                r"block_table\[0, 1\] is 10; allowed: 0 to 9, a block of the cache",
            ),
            (
                {"block_table": i32(1, 2, 3, 0, -1, 0, 0, 0).view(4, 2)},
                r"block_table\[2, 0\] is -1; allowed: 0 to 9",
            ),
            (
                {"slot_mapping": torch.tensor([7, 8, 40, 16, 17, 18])},
                r"slot_mapping\[2\] is 40; allowed: 0 to 39, or -1 for a token that is not written",
            ),
            (
                {"slot_mapping": torch.tensor([7, 8, -2, 16, 17, 18])},
                r"slot_mapping\[2\] is -2; allowed: 0 to 39",
            ),
            (
                {"slot_mapping": torch.tensor([7, 8, 12, 16, 18, 18])},
                r"slot_mapping\[5\] is 18; allowed: a slot that no earlier token writes",
            ),
            (
                {"slot_mapping": torch.tensor([7, 8, 12, 16, 17, 18, 30])},
                r"slot_mapping\[6\] is 30; allowed: -1: row 6 of query is padding",
            ),
            (
                {"slot_mapping": torch.tensor([7, 8, 20, 16, 17, 18])},
                r"slot_mapping\[2\] is 20; allowed: 12, where block_table .* in blocks of 4, or -1",
            ),
            (
                {"slot_mapping": torch.tensor([7, 8, -1, 16, -1, 8])},
                r"slot_mapping\[5\] is 8; allowed: a slot that no earlier token writes",
            ),
            (
                {"mm_prefix_ranges": {4: [(0, 1)]}},
                "mm_prefix_ranges key is 4; allowed: a request, 0 to 3",
            ),
            (
                {"mm_prefix_ranges": {0: [(0, 1), (3, 2)]}},
                r"mm_prefix_ranges\[0\]\[1\] is \(3, 2\); allowed: 0 <= start <= end < 5",
            ),
            ({"mm_prefix_ranges": {0: [(0, 5)]}}, r"is \(0, 5\); .* < 5, the seq_len"),
            ({"mm_prefix_ranges": {0: [(-1, 2)]}}, r"is \(-1, 2\)"),
        ],
    )
    def test_contents(self, changes: dict[str, Any], message: str) -> None:
        with pytest.raises(MetadataError, match=message):
            check(batch(**changes))

    def test_cross_attention_beyond_its_table(self) -> None:
        with pytest.raises(MetadataError, match=r"seq_lens\[0\] is 9; allowed: at most 8"):
            check(batch(encoder_seq_lens=i32(9, 0, 0, 0)))

    def test_without_a_cache_only_what_needs_none_is_checked(self) -> None:
        far = batch(slot_mapping=torch.tensor([7, 8, 40, 16, 17, 18]))
        check_metadata(far)
        with pytest.raises(MetadataError, match=r"slot_mapping\[2\] is -5; allowed: >= 0, or -1"):
            check_metadata(batch(slot_mapping=torch.tensor([7, 8, -5, 16, 17, 18])))


def test_slots_of_another_block_size_are_found_by_the_table() -> None:
    table = torch.tensor([[1, 2]])
    made_for_two = CommonAttentionMetadata.from_lengths(
        query_lens=[3],
        seq_lens=[3],
        block_table=table,
        # Blocks of 2 put positions 0 to 2 at slots 2, 3 and 4; blocks of 4 at 4, 5 and 6.
        slot_mapping=torch.tensor([2, 3, 4]),
    )
    with pytest.raises(MetadataError, match=r"slot_mapping\[0\] is 2; allowed: 4, where"):
        check(made_for_two)


def test_a_padded_row_has_no_place_to_write_to() -> None:
    padded = CommonAttentionMetadata.from_lengths(
        query_lens=[1], seq_lens=[0], block_table=torch.tensor([[1]]), slot_mapping=LONG[:1]
    )
    with pytest.raises(MetadataError, match=r"slot_mapping\[0\] is 4; allowed: -1"):
        check(padded)


def test_a_negative_block_is_refused_whatever_the_cache() -> None:
    wrong = batch(block_table=i32(1, -7, 3, 0, 4, 0, 0, 0).view(4, 2))
    with pytest.raises(MetadataError, match=r"block_table\[0, 1\] is -7; allowed: >= 0"):
        check_metadata(wrong, spec=SPEC)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 5),  # block 4 holds request 2; what is not read does not count
        ({"slot_mapping": None}, 5),
        ({"block_table": None}, 5),  # slot 18 is in block 4
        ({"block_table": None, "slot_mapping": torch.tensor([-1] * 6)}, 0),
        ({"encoder_seq_lens": i32(5, 1, 0, 0)}, 5),  # block 3, and slots up to 18
        ({"slot_mapping": torch.tensor([39] * 6)}, 10),
    ],
)
def test_blocks_that_a_cache_must_have(changes: dict[str, Any], expected: int) -> None:
    assert blocks_needed(batch(**changes), SPEC) == expected


def test_a_cache_without_blocks_needs_none() -> None:
    assert blocks_needed(batch(), None) is None


def test_a_negative_block_that_is_read_is_no_number_of_blocks() -> None:
    unread, read = i32(1, 2, 3, -9, 4, -9, -9, 0), i32(1, -7, 3, 0, 4, 0, 0, 0)
    assert blocks_needed(batch(block_table=unread.view(4, 2)), SPEC) == 5
    with pytest.raises(MetadataError, match=r"block_table\[0, 1\] is -7; allowed: >= 0"):
        blocks_needed(batch(block_table=read.view(4, 2)), SPEC)


def test_a_bound_counts_what_is_not_read_and_reads_what_may_be_wrong() -> None:
    unread, padded = i32(1, 2, 3, 70, 4, 0, 0, 0), i32(1, 2, 3, -1, 4, -1, -1, 70)
    assert blocks_at_most(batch(block_table=unread.view(4, 2)), SPEC) == 71
    assert blocks_at_most(batch(block_table=padded.view(4, 2)), SPEC) == 5
    assert blocks_at_most(batch(block_table=None), SPEC) == 5
    read = i32(1, -7, 3, 0, 4, 0, 0, 0)
    with pytest.raises(MetadataError, match=r"block_table\[0, 1\] is -7; allowed: >= 0"):
        blocks_at_most(batch(block_table=read.view(4, 2)), SPEC)


def test_off_during_graph_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = batch(max_seq_len=0, seq_lens_cpu=None)
    monkeypatch.setattr(torch.cpu, "is_current_stream_capturing", lambda: True, raising=False)
    check(broken)
    monkeypatch.setattr(torch.cpu, "is_current_stream_capturing", lambda: False, raising=False)
    with pytest.raises(MetadataError, match="max_seq_len is 0"):
        check(broken)


@settings(derandomize=True, max_examples=50)
@given(
    requests=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), max_size=5),
    data=st.data(),
)
def test_from_lengths_is_sound_and_one_wrong_block_is_found(
    requests: list[tuple[int, int]], data: st.DataObject
) -> None:
    seq_lens = [new + old for new, old in requests]
    used = [-(-length // SPEC.block_size) for length in seq_lens]
    num_blocks = sum(used)
    ids = iter(range(num_blocks))
    table = torch.full((len(requests), 4), -1)
    for row, count in enumerate(used):
        table[row, :count] = torch.tensor([next(ids) for _ in range(count)])
    common = CommonAttentionMetadata.from_lengths(
        query_lens=[new for new, _ in requests],
        seq_lens=seq_lens,
        block_table=table,
        block_size=SPEC.block_size,
    )
    check_metadata(common, spec=SPEC, num_blocks=num_blocks)
    if num_blocks:
        row = data.draw(st.sampled_from([row for row, count in enumerate(used) if count]))
        column = data.draw(st.integers(0, used[row] - 1))
        table = table.int()
        table[row, column] = num_blocks
        wrong = common.with_fields(block_table=table)
        with pytest.raises(MetadataError, match=rf"block_table\[{row}, {column}\] is {num_blocks}"):
            check_metadata(wrong, spec=SPEC, num_blocks=num_blocks)
