"""Padded batches at fixed addresses: contents by hand, and that nothing moves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attn_shared.checked import check_metadata
from attn_shared.errors import InvalidInputError, InvalidRequestError, MetadataError
from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.static_batch import StaticBatch, padded_size

NAMES = ("query_start_loc", "seq_lens", "block_table", "slot_mapping")


def static(**changes: Any) -> StaticBatch:
    plain: dict[str, Any] = {"num_reqs": 3, "max_seq_len": 12, "block_size": 4}
    return StaticBatch(**(plain | changes))


def table(*rows: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def addresses(common: CommonAttentionMetadata) -> list[int]:
    return [getattr(common, name).data_ptr() for name in NAMES]


@pytest.mark.parametrize(("num_reqs", "size"), [(0, 1), (1, 1), (2, 4), (4, 4), (5, 8), (8, 8)])
def test_the_smallest_size_that_holds_a_batch(num_reqs: int, size: int) -> None:
    assert padded_size(num_reqs, (8, 1, 4)) == size


@pytest.mark.parametrize(("sizes", "most"), [((1, 8), 8), ((), 0)])
def test_a_batch_that_no_size_holds(sizes: tuple[int, ...], most: int) -> None:
    with pytest.raises(InvalidInputError, match=f"num_reqs is 9; allowed: at most {most}.*without"):
        padded_size(9, sizes)


def test_a_step_by_hand() -> None:
    common = static().update([5, 8], table((7, 2), (3, 9)))
    assert common.query_start_loc.tolist() == [0, 1, 2, 3]
    assert common.seq_lens.tolist() == [5, 8, 0]
    assert common.seq_lens_cpu is not None
    assert common.seq_lens_cpu.tolist() == [5, 8, 0]
    assert common.slot_mapping is not None
    assert common.slot_mapping.tolist() == [2 * 4 + 0, 9 * 4 + 3, -1]
    assert common.block_table is not None
    assert common.block_table.tolist() == [[7, 2, 0], [3, 9, 0], [0, 0, 0]]
    assert (common.num_reqs, common.num_actual_tokens) == (3, 3)
    assert (common.max_query_len, common.max_seq_len) == (1, 8)


def test_several_query_tokens_by_hand() -> None:
    common = static(num_reqs=2, query_len=2).update([6], table((7, 2)))
    assert common.query_start_loc.tolist() == [0, 2, 4]
    assert common.slot_mapping is not None
    assert common.slot_mapping.tolist() == [2 * 4 + 0, 2 * 4 + 1, -1, -1]


def test_nothing_moves_and_nothing_of_an_older_step_is_left() -> None:
    batch = static()
    first = batch.for_capture()
    before = addresses(first)
    batch.update([12, 8, 4], table((1, 2, 3), (4, 5, 6), (7, 8, 9)))
    last = batch.update([5], table((7, 2)))
    assert addresses(last) == before
    assert last.seq_lens.tolist() == [5, 0, 0]
    assert last.block_table is not None
    assert last.block_table.tolist() == [[7, 2, 0], [0, 0, 0], [0, 0, 0]]
    assert last.slot_mapping is not None
    assert last.slot_mapping.tolist() == [8, -1, -1]


def test_what_is_captured_is_all_padding_with_the_widest_bounds() -> None:
    batch = static(query_len=2)
    batch.update([6], table((7, 2)))
    common = batch.for_capture()
    assert common.seq_lens.tolist() == [0, 0, 0]
    assert common.slot_mapping is not None
    assert common.slot_mapping.tolist() == [-1] * 6
    assert (common.max_query_len, common.max_seq_len) == (2, 12)


def test_steps_pass_the_check_of_contents() -> None:
    batch = static(query_len=2)
    check_metadata(batch.for_capture(), num_blocks=10)
    check_metadata(batch.update([6, 2], table((7, 2), (3, 9))), num_blocks=10)


@pytest.mark.parametrize(
    ("seq_lens", "rows", "complaint"),
    [
        ([1] * 4, [(0,)] * 4, "seq_lens length is 4; allowed: at most 3"),
        ([5], [(7,)], r"seq_lens\[0\] is 5; allowed: 1 \(the query length\) to 4"),
        ([13], [(1, 2, 3, 4)], r"seq_lens\[0\] is 13; allowed: 1 .* to 12"),
        ([0], [(7,)], r"seq_lens\[0\] is 0"),
        ([5, 5], [(7, 2)], r"block_table shape is \(1, 2\); allowed: \(2, any\)"),
    ],
)
def test_what_does_not_fit_is_refused(
    seq_lens: list[int], rows: list[tuple[int, ...]], complaint: str
) -> None:
    with pytest.raises(MetadataError, match=complaint):
        static().update(seq_lens, table(*rows))


def test_a_table_on_the_device_is_refused() -> None:
    with pytest.raises(MetadataError, match="block_table device is meta; allowed: cpu"):
        static().update([5], table((7, 2)).to("meta"))


@pytest.mark.parametrize("name", ["num_reqs", "max_seq_len", "block_size", "query_len"])
def test_sizes_are_positive(name: str) -> None:
    with pytest.raises(InvalidRequestError, match=name):
        static(**{name: 0})
