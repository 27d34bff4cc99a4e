"""One rank's share of a batch, as ordinary batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attn_shared._dcp_batch import Shard, shard_parts
from attn_shared.errors import MetadataError
from attn_shared.metadata import CommonAttentionMetadata


def shard(rank: int = 0, interleave: int = 1, world_size: int = 2, block_size: int = 4) -> Shard:
    return Shard(world_size=world_size, rank=rank, interleave=interleave, block_size=block_size)


def batch(query_lens: list[int], seq_lens: list[int], **options: Any) -> CommonAttentionMetadata:
    count = len(seq_lens)
    table = torch.arange(100 * count).view(count, 100)
    return CommonAttentionMetadata.from_lengths(
        query_lens=query_lens, seq_lens=seq_lens, block_table=table, **options
    )


def positions(place: Shard, numbers: range) -> list[int]:
    """Return where a rank's own tokens stand in their sequence, by walking along it."""
    own = [
        position
        for position in range(2000)
        if position // place.interleave % place.world_size == place.rank
    ]
    return [own[number] for number in numbers]


def seen_keys(
    common: CommonAttentionMetadata, place: Shard, left: int | None, *, may_tile: bool = True
) -> list[list[int]]:
    """Return the positions that each query row sees on this rank, over all parts."""
    found: list[list[int]] = [[] for _ in range(common.num_actual_tokens)]
    for part in shard_parts(common, place, left=left, may_tile=may_tile):
        sub = part.common
        assert sub.block_table is not None
        rows = range(common.num_actual_tokens) if part.rows is None else part.rows.tolist()
        starts = sub.query_start_loc_cpu.tolist()
        for request in range(sub.num_reqs):
            length = int(sub.seq_lens[request])
            first_block = int(sub.block_table[request, 0]) % 100
            begin = first_block * place.block_size
            lowest = 0 if part.window is None else max(0, length - part.window)
            for row in range(starts[request], starts[request + 1]):
                # Causal parts have one row a request, which sees every key there is.
                assert sub.causal is False or starts[request + 1] - starts[request] == 1
                own = positions(place, range(begin + lowest, begin + length))
                assert not set(own) & set(found[rows[row]])
                found[rows[row]] += own
    return found


@settings(derandomize=True, max_examples=60)
@given(
    requests=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 90)), min_size=1, max_size=3),
    world_size=st.integers(2, 4),
    interleave=st.sampled_from([1, 2, 4]),
    left=st.none() | st.integers(0, 30),
    rank=st.integers(0, 3),
)
def test_each_row_sees_its_own_keys_once(
    requests: list[tuple[int, int]],
    world_size: int,
    interleave: int,
    left: int | None,
    rank: int,
) -> None:
    place = shard(rank % world_size, interleave, world_size)
    common = batch([new for new, _ in requests], [new + old for new, old in requests])
    expected = []
    for new, old in requests:
        for position in range(old, old + new):
            first = 0 if left is None else max(0, position - left)
            seen = range(first, position + 1)
            expected.append([p for p in seen if p // interleave % world_size == place.rank])
    assert [sorted(keys) for keys in seen_keys(common, place, left)] == expected


def test_decodes_are_one_part_over_the_table_as_it_is() -> None:
    common = batch([1, 1], [7, 4])
    (part,) = shard_parts(common, shard(rank=1))
    assert part.rows is None
    assert part.common.block_table is common.block_table
    assert part.common.seq_lens.tolist() == [3, 2]
    assert part.common.seq_lens_cpu is not None
    assert part.common.seq_lens_cpu.tolist() == [3, 2]
    assert part.common.max_query_len == 1
    assert part.common.slot_mapping is None


def test_a_prefill_reads_the_context_once_a_tile() -> None:
    # Tiles of 128 rows, beginning at multiples of 8: from position 200, 328 and 456 on.
    common = batch([300], [500])
    own, before = shard_parts(common, shard())
    assert own.common.num_reqs == 300
    assert int(own.common.seq_lens.max()) <= 64
    assert before.common.causal is False
    assert sorted(before.common.seq_lens.tolist()) == [100, 164, 228]
    assert sorted(before.common.query_start_loc_cpu.diff().tolist()) == [44, 128, 128]
    assert before.rows is not None
    assert sorted(before.rows.tolist()) == list(range(300))


def test_without_tiles_every_row_is_a_request() -> None:
    (part,) = shard_parts(batch([300], [500]), shard(), may_tile=False)
    assert part.common.num_reqs == 300


def test_rows_without_a_causal_mask_and_in_ranges() -> None:
    assert seen_keys(batch([2], [6], causal=False), shard(), None) == [[0, 2, 4]] * 2
    common = batch([12], [20], mm_prefix_ranges={0: [(9, 11), (18, 19)]})
    keys = seen_keys(common, shard(), None)
    # Rows 8 to 19: the range lifts 9 and 10 to 11, and 18 to 19, of which rank 0 holds 10 and 18.
    assert [max(each) for each in keys] == [8, 10, 10, 10, 12, 12, 14, 14, 16, 16, 18, 18]


def test_lengths_that_only_the_device_knows() -> None:
    common = batch([1, 1], [30, 9]).with_fields(seq_lens_cpu=None)
    (part,) = shard_parts(common, shard())
    assert part.common.seq_lens_cpu is None
    assert part.common.seq_lens.tolist() == [15, 5]
    assert part.common.max_seq_len == 15
    # Three keys of a window are one or two of a rank's: two parts beside the unbounded one.
    parts = shard_parts(common, shard(), left=2)
    assert [part.window for part in parts] == [None, 1, 2]
    assert [part.common.num_reqs for part in parts] == [2, 2, 2]
    # Row 29 sees 27 28 29, of which 28 is rank 0's 14th; row 8 sees 6 7 8, its 3rd and 4th.
    kept = [part.common.seq_lens.tolist() for part in parts]
    assert kept[0] == [0, 0]
    assert kept[1][1] == 0
    assert kept[1][0] > 0
    assert kept[2][0] == 0
    assert kept[2][1] > 0


def test_refuses_what_it_cannot_place() -> None:
    common = batch([1], [3])
    with pytest.raises(MetadataError, match="block_table is None"):
        shard_parts(common.with_fields(block_table=None), shard())
    ranges = common.with_fields(seq_lens_cpu=None, mm_prefix_ranges={0: [(0, 2)]})
    with pytest.raises(MetadataError, match="seq_lens_cpu is missing"):
        shard_parts(ranges, shard())


@pytest.mark.parametrize("interleave", [1, 2, 4])
@pytest.mark.parametrize("num_keys", [1, 5, 8, 19])
def test_widths_are_those_that_occur(interleave: int, num_keys: int) -> None:
    place = shard(1, interleave, 3)
    found = {
        sum(p // interleave % 3 == 1 for p in range(first, first + num_keys))
        for first in range(3 * interleave)
    }
    assert set(place.widths(num_keys)) == found
