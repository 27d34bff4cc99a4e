from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch

from attn_shared.errors import MetadataError, UnknownNameError
from attn_shared.metadata import CommonAttentionMetadata


def i32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def everything() -> CommonAttentionMetadata:
    """Three requests of 2, 1 and 3 tokens, every field set."""
    return CommonAttentionMetadata(
        query_start_loc=i32(0, 2, 3, 6),
        query_start_loc_cpu=i32(0, 2, 3, 6),
        seq_lens=i32(5, 1, 3),
        seq_lens_cpu=i32(5, 1, 3),
        num_reqs=3,
        num_actual_tokens=6,
        max_query_len=3,
        max_seq_len=5,
        block_table=i32(1, 2, 3, 0, 4, 0).view(3, 2),
        slot_mapping=torch.tensor([7, 8, 12, 16, 17, 18]),
        causal=torch.tensor([True, False, True]),
        causal_cpu=torch.tensor([True, False, True]),
        key_start_loc=i32(0, 4, 5, 9),
        key_start_loc_cpu=i32(0, 4, 5, 9),
        encoder_seq_lens_cpu=i32(3, 2, 1),
        is_prefilling=torch.tensor([False, False, True]),
        mm_prefix_ranges={0: [(0, 1)], 2: [(1, 2)]},
        dcp_local_seq_lens=i32(3, 1, 2),
        dcp_local_seq_lens_cpu=i32(3, 1, 2),
        positions=torch.tensor([3, 4, 0, 0, 1, 2]),
    )


def valid(**changes: Any) -> CommonAttentionMetadata:
    return CommonAttentionMetadata.from_lengths(
        query_lens=[2, 1], seq_lens=[5, 1], block_table=i32(1, 2, 3, 0).view(2, 2), block_size=4
    ).with_fields(**changes)


class TestFromLengths:
    def test_by_hand(self) -> None:
        common = CommonAttentionMetadata.from_lengths(
            query_lens=[2, 1, 3],
            seq_lens=[5, 1, 3],
            block_table=torch.tensor([[1, 2], [3, 9], [4, 9]]),
            block_size=4,
        )
        assert common.query_start_loc.tolist() == [0, 2, 3, 6]
        assert common.query_start_loc_cpu.tolist() == [0, 2, 3, 6]
        assert common.query_lens_cpu.tolist() == [2, 1, 3]
        assert common.seq_lens.tolist() == [5, 1, 3]
        assert common.exact_seq_lens_cpu.tolist() == [5, 1, 3]
        assert (common.num_reqs, common.num_actual_tokens) == (3, 6)
        assert (common.max_query_len, common.max_seq_len) == (3, 5)
        assert common.block_table is not None
        assert common.block_table.dtype is torch.int32
        # Request 0 writes positions 3 and 4: the last of block 1, the first of block 2.
        assert common.slot_mapping is not None
        assert common.slot_mapping.tolist() == [7, 8, 12, 16, 17, 18]
        assert common.slot_mapping.dtype is torch.int64

    def test_a_padded_row_writes_nothing(self) -> None:
        common = CommonAttentionMetadata.from_lengths(
            query_lens=[1, 1, 0],
            seq_lens=[3, 0, 0],
            block_table=torch.tensor([[5], [6], [7]]),
            block_size=4,
        )
        assert common.slot_mapping is not None
        assert common.slot_mapping.tolist() == [22, -1]

    def test_empty_batch(self) -> None:
        common = CommonAttentionMetadata.from_lengths(
            query_lens=[],
            seq_lens=[],
            block_table=torch.zeros(0, 3, dtype=torch.int32),
            block_size=4,
        )
        assert common.query_start_loc.tolist() == [0]
        assert (common.num_reqs, common.num_actual_tokens, common.max_seq_len) == (0, 0, 0)
        assert common.slot_mapping is not None
        assert common.slot_mapping.shape == (0,)

    def test_cache_free(self) -> None:
        common = CommonAttentionMetadata.from_lengths(
            query_lens=[2, 3], seq_lens=[2, 3], causal=False
        )
        assert common.block_table is None
        assert common.slot_mapping is None
        assert common.causal is False

    def test_slots_beyond_32_bits(self) -> None:
        common = CommonAttentionMetadata.from_lengths(
            query_lens=[1], seq_lens=[16], block_table=torch.tensor([[2**31 - 1]]), block_size=16
        )
        assert common.slot_mapping is not None
        assert common.slot_mapping.tolist() == [(2**31 - 1) * 16 + 15]

    def test_own_slots_are_kept_and_cross_attention_gets_none(self) -> None:
        table = torch.tensor([[3]])
        own = CommonAttentionMetadata.from_lengths(
            query_lens=[1],
            seq_lens=[1],
            block_table=table,
            block_size=4,
            slot_mapping=torch.tensor([-1]),
        )
        assert own.slot_mapping is not None
        assert own.slot_mapping.tolist() == [-1]
        cross = CommonAttentionMetadata.from_lengths(
            query_lens=[1],
            seq_lens=[9],
            block_table=table,
            block_size=4,
            encoder_seq_lens=i32(3),
        )
        assert cross.slot_mapping is None

    @pytest.mark.parametrize(
        ("query_lens", "seq_lens", "table", "block_size", "message"),
        [
            ([1, 1], [1], [[0], [1]], 4, r"seq_lens length is 1; allowed: 2"),
            ([3], [2], [[0]], 4, r"seq_lens\[0\] is 2; allowed: query_lens\[0\] = 3 to 4"),
            ([1, 1], [4, 5], [[0], [1]], 4, r"seq_lens\[1\] is 5; allowed: .* to 4"),
            ([1], [-1], [[0]], 4, r"seq_lens\[0\] is -1"),
            ([-1], [0], [[0]], 4, r"query_lens\[0\] = -1"),
            ([1], [1], [[0], [1]], 4, r"block_table shape is \(2, 1\); allowed: \(1, any\)"),
            ([1], [1], [[0]], 0, r"block_size is 0; allowed: an integer >= 1"),
            ([1], [1], None, 4, r"block_table is None; .* block_size=4"),
        ],
    )
    def test_refuses(
        self,
        query_lens: list[int],
        seq_lens: list[int],
        table: list[list[int]] | None,
        block_size: int,
        message: str,
    ) -> None:
        with pytest.raises(MetadataError, match=message):
            CommonAttentionMetadata.from_lengths(
                query_lens=query_lens,
                seq_lens=seq_lens,
                block_table=None if table is None else torch.tensor(table),
                block_size=block_size,
            )


class TestUnpadded:
    def test_cuts_every_field(self) -> None:
        common = everything()
        cut = common.unpadded(3, 2)
        rows = {
            "query_start_loc": [0, 2, 3],
            "query_start_loc_cpu": [0, 2, 3],
            "seq_lens": [5, 1],
            "seq_lens_cpu": [5, 1],
            "block_table": [[1, 2], [3, 0]],
            "slot_mapping": [7, 8, 12],
            "causal": [True, False],
            "causal_cpu": [True, False],
            "key_start_loc": [0, 4, 5],
            "key_start_loc_cpu": [0, 4, 5],
            "encoder_seq_lens_cpu": [3, 2],
            "is_prefilling": [False, False],
            "dcp_local_seq_lens": [3, 1],
            "dcp_local_seq_lens_cpu": [3, 1],
            "positions": [3, 4, 0],
        }
        for name, expected in rows.items():
            assert getattr(cut, name).tolist() == expected, name
        assert cut.mm_prefix_ranges == {0: [(0, 1)]}
        assert (cut.num_reqs, cut.num_actual_tokens) == (2, 3)
        assert (cut.max_query_len, cut.max_seq_len) == (3, 5)
        assert cut.seq_lens_cpu_is_exact
        is_tensor = {
            field.name
            for field in fields(common)
            if isinstance(getattr(common, field.name), torch.Tensor)
        }
        assert is_tensor == rows.keys(), "a new tensor field needs its expectation here"

    def test_cross_attention_keeps_the_encoder_tokens_slots(self) -> None:
        cut = everything().with_fields(encoder_seq_lens=i32(3, 2, 1)).unpadded(3, 2)
        assert cut.encoder_seq_lens is not None
        assert cut.encoder_seq_lens.tolist() == [3, 2]
        assert cut.slot_mapping is not None
        assert cut.slot_mapping.tolist() == [7, 8, 12, 16, 17, 18]

    def test_all_of_it_is_the_same_batch(self) -> None:
        common = everything()
        cut = common.unpadded(6, 3)
        for field in fields(common):
            before, after = getattr(common, field.name), getattr(cut, field.name)
            if isinstance(before, torch.Tensor):
                assert torch.equal(before, after), field.name
                assert before.data_ptr() == after.data_ptr(), field.name
            else:
                assert before == after, field.name

    @pytest.mark.parametrize(
        ("tokens", "reqs", "message"),
        [
            (7, 3, "num_actual_tokens is 7; allowed: 0 to 6"),
            (6, 4, "num_actual_reqs is 4; allowed: 0 to 3"),
            (-1, 3, "num_actual_tokens is -1"),
        ],
    )
    def test_refuses_more_than_there_is(self, tokens: int, reqs: int, message: str) -> None:
        with pytest.raises(MetadataError, match=message):
            everything().unpadded(tokens, reqs)


class TestShapes:
    @pytest.mark.parametrize(
        ("name", "value", "message"),
        [
            ("query_start_loc", i32(0, 2), r"query_start_loc shape is \(2,\); allowed: \(3\)"),
            ("query_start_loc", torch.tensor([0, 2, 3]), r"query_start_loc dtype is torch.int64"),
            ("query_start_loc_cpu", i32(0, 2, 3, 3), r"query_start_loc_cpu shape is \(4,\)"),
            ("seq_lens", i32(5), r"seq_lens shape is \(1,\); allowed: \(2\) for num_reqs=2"),
            ("seq_lens", torch.tensor([5.0, 1.0]), "allowed: torch.int32"),
            ("seq_lens_cpu", i32(5, 1).view(2, 1), r"seq_lens_cpu shape is \(2, 1\)"),
            ("block_table", i32(1, 2), r"block_table shape is \(2,\); allowed: \(2, any\)"),
            ("block_table", torch.zeros(2, 2).long(), "block_table dtype is torch.int64"),
            ("slot_mapping", i32(1, 2, 3), "slot_mapping dtype is torch.int32"),
            ("positions", i32(1, 2, 3), "positions dtype is torch.int32"),
            ("encoder_seq_lens", i32(1), "encoder_seq_lens shape"),
            ("dcp_local_seq_lens", i32(1), "dcp_local_seq_lens shape"),
            ("is_prefilling", i32(1, 0), "is_prefilling dtype"),
            ("key_start_loc_cpu", i32(0, 1), r"key_start_loc_cpu shape is \(2,\)"),
            ("key_start_loc", i32(0, 5, 6), "key_start_loc_cpu is None; .*host mirror"),
            ("causal", torch.tensor([True, False]), "causal_cpu is None; .*host mirror"),
            ("causal", None, "causal is None; allowed: True, False or"),
            ("causal", i32(1, 0), "causal dtype"),
            ("num_actual_tokens", -1, "num_actual_tokens is -1"),
            ("max_seq_len", -5, "max_seq_len is -5"),
        ],
    )
    def test_refuses(self, name: str, value: object, message: str) -> None:
        with pytest.raises(MetadataError, match=message):
            valid(**{name: value})

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            (
                {"num_actual_tokens": 2},
                r"num_actual_tokens is 2; allowed: query_start_loc\[-1\] = 3",
            ),
            ({"max_query_len": 1}, "max_query_len is 1; allowed: at least 2, .* of request 0"),
            ({"max_seq_len": 4}, "max_seq_len is 4; allowed: at least 5, the seq_len of request 0"),
            (
                {"slot_mapping": torch.tensor([7, 8])},
                "slot_mapping length is 2; allowed: at least 3, one per query token",
            ),
            ({"positions": torch.tensor([1, 2])}, "positions length is 2; allowed: at least 3"),
        ],
    )
    def test_counts_that_the_host_knows_better(self, changes: dict[str, Any], message: str) -> None:
        with pytest.raises(MetadataError, match=message):
            valid(**changes)

    def test_an_upper_bound_may_exceed_max_seq_len(self) -> None:
        loose = valid(seq_lens_cpu=i32(9, 9), seq_lens_cpu_is_exact=False)
        assert loose.max_seq_len == 5

    def test_the_encoders_slots_are_counted_by_the_encoder(self) -> None:
        cross = valid(encoder_seq_lens=i32(1, 1), slot_mapping=torch.tensor([4, 12]))
        assert cross.slot_mapping is not None
        assert cross.slot_mapping.tolist() == [4, 12]

    @pytest.mark.parametrize(
        ("ranges", "message"),
        [
            ([(0, 1)], r"mm_prefix_ranges is \[\(0, 1\)\]; allowed: a mapping of requests"),
            (None, "mm_prefix_ranges is None; allowed: a mapping"),
            ({"0": [(0, 1)]}, "mm_prefix_ranges key is '0'; allowed: a request, an integer"),
            ({0: (0, 1)}, r"mm_prefix_ranges\[0\]\[0\] is 0; allowed: a pair \(start, end\)"),
            ({0: [(3,)]}, r"mm_prefix_ranges\[0\]\[0\] is \(3,\); allowed: a pair"),
            ({0: [(0, 1), (0, 1.5)]}, r"mm_prefix_ranges\[0\]\[1\] is \(0, 1.5\)"),
            ({1: 3}, r"mm_prefix_ranges\[1\] is 3; allowed: a sequence of pairs"),
        ],
    )
    def test_malformed_multimodal_ranges(self, ranges: Any, message: str) -> None:
        with pytest.raises(MetadataError, match=message):
            valid(mm_prefix_ranges=ranges)

    def test_places(self) -> None:
        with pytest.raises(MetadataError, match="seq_lens_cpu device is meta; allowed: cpu"):
            valid(seq_lens_cpu=torch.zeros(2, dtype=torch.int32, device="meta"))
        with pytest.raises(MetadataError, match="is_prefilling device is meta; allowed: cpu"):
            valid(is_prefilling=torch.zeros(2, dtype=torch.bool, device="meta"))
        with pytest.raises(MetadataError, match="slot_mapping device is meta; allowed: cpu, where"):
            valid(slot_mapping=torch.zeros(3, dtype=torch.int64, device="meta"))

    def test_a_fake_device_with_host_mirrors(self) -> None:
        common = CommonAttentionMetadata.from_lengths(
            query_lens=[1], seq_lens=[1], device="meta", is_prefilling=torch.tensor([True])
        )
        assert common.seq_lens.device.type == "meta"
        assert common.exact_seq_lens_cpu.tolist() == [1]


class TestExactLengths:
    def test_missing(self) -> None:
        with pytest.raises(MetadataError, match=r"seq_lens_cpu is missing; .*exact host lengths"):
            _ = valid(seq_lens_cpu=None).exact_seq_lens_cpu

    def test_upper_bound(self) -> None:
        common = valid(seq_lens_cpu=i32(6, 1), seq_lens_cpu_is_exact=False)
        with pytest.raises(MetadataError, match="seq_lens_cpu is an upper bound"):
            _ = common.exact_seq_lens_cpu

    def test_with_fields_is_validated_anew(self) -> None:
        assert valid(max_seq_len=9).max_seq_len == 9
        with pytest.raises(MetadataError, match="num_reqs=3"):
            valid(num_reqs=3)


class TestFromLengthsRefuses:
    """What a conversion to int32 would change without a word."""

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"query_lens": [1.7, 5]}, r"query_lens\[0\] is 1.7; allowed: a 32-bit integer"),
            ({"seq_lens": [20, 2**31]}, r"seq_lens\[1\] is 2147483648; allowed: a 32-bit"),
            ({"block_table": torch.tensor([[2**33, 1], [2, 3]])}, "block_table is 8589934592"),
            ({"block_table": torch.tensor([[0.5, 1], [2, 3]])}, "block_table dtype is"),
            ({"block_table": [[0, 1], [2, 3]]}, "allowed: a tensor of int32 or int64"),
            ({"block_size": 16.0}, "block_size is 16.0; allowed: an integer >= 1"),
            ({"seq_lens": None}, "seq_lens is None; allowed: a sequence of integers"),
            ({"query_lens": 3}, "query_lens is 3; allowed: a sequence of integers"),
            ({"device": "bogus"}, "device is 'bogus'; allowed: a torch device"),
            ({"device": None}, "device is None; allowed: a torch device"),
        ],
    )
    def test_it(self, changes: dict[str, Any], words: str) -> None:
        table = torch.tensor([[0, 1], [2, 3]])
        plain = {"query_lens": [1, 5], "seq_lens": [20, 5], "block_table": table, "block_size": 16}
        with pytest.raises(MetadataError, match=words):
            CommonAttentionMetadata.from_lengths(**{**plain, **changes})


def test_an_option_that_is_no_field_is_named() -> None:
    with pytest.raises(UnknownNameError, match=r"'cuasal'; .* did you mean 'causal'"):
        CommonAttentionMetadata.from_lengths(query_lens=[1], seq_lens=[1], cuasal=False)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("seq_lens", None, "seq_lens is None; allowed: a tensor"),
        ("query_start_loc_cpu", None, "query_start_loc_cpu is None"),
        ("slot_mapping", [0, 1], r"slot_mapping is \[0, 1\]; allowed: a tensor"),
        ("num_reqs", 3.0, "num_reqs is 3.0; allowed: an integer >= 0"),
    ],
)
def test_a_field_of_another_kind_is_refused(name: str, value: Any, words: str) -> None:
    with pytest.raises(MetadataError, match=words):
        everything().with_fields(**{name: value})
