"""Which requests share a call, and what a shared call reads."""

from __future__ import annotations

import pytest
import torch

from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.request import AttentionType
from attn_torch._batch import HostBatch
from attn_torch._plan import GroupLimits, GroupTile, Plan, RequestTile, Tiler
from attn_torch._visibility import Visibility

CPU = torch.device("cpu")
ROOMY = GroupLimits(max_keys=1000, max_logits=1000)
ALONE = GroupLimits(max_keys=0, max_logits=1000)


def _plan(
    query_lens: list[int],
    seq_lens: list[int],
    *,
    limits: GroupLimits = ROOMY,
    window: tuple[int | None, int | None] = (None, None),
    attn_type: AttentionType = AttentionType.DECODER,
    **options,
) -> Plan:
    table = torch.arange(40 * len(seq_lens), dtype=torch.int32).view(len(seq_lens), 40)
    is_paged = attn_type is AttentionType.DECODER
    common = CommonAttentionMetadata.from_lengths(
        query_lens=query_lens,
        seq_lens=seq_lens,
        block_table=table if is_paged else None,
        **options,
    )
    block_size = 4 if is_paged else None
    tiler = Tiler(
        visibility=Visibility(window=window), limits=limits, device=CPU, block_size=block_size
    )
    return tiler.plan(HostBatch.of(common, attn_type, block_size), common.block_table)


def _groups(plan: Plan) -> list[list[int]]:
    return sorted(
        tile.requests.flatten().tolist() if isinstance(tile, GroupTile) else [tile.span.request]
        for tile in plan.tiles
    )


def test_decodes_of_like_lengths_share_a_call():
    assert _groups(_plan([1, 1, 1, 1], [20, 100, 19, 90])) == [[0, 2], [1, 3]]


def test_only_equal_query_lengths_and_causalities_share():
    flags = torch.tensor([True, True, False, False])
    plan = _plan([1, 2, 1, 1], [20, 20, 20, 20], causal=flags, causal_cpu=flags)
    assert _groups(plan) == [[0], [1], [2, 3]]


def test_prefills_and_ranges_stay_alone():
    assert _groups(_plan([9, 9], [20, 20])) == [[0], [1]]
    assert _groups(_plan([1, 1], [20, 20], mm_prefix_ranges={0: [(3, 19)]})) == [[0], [1]]


def test_a_group_ends_where_its_keys_or_logits_would_be_too_many():
    keys = GroupLimits(max_keys=50, max_logits=1000)
    assert _groups(_plan([1] * 5, [20] * 5, limits=keys)) == [[0, 1], [2, 3], [4]]
    logits = GroupLimits(max_keys=1000, max_logits=50)
    assert _groups(_plan([1] * 5, [20] * 5, limits=logits)) == [[0, 1], [2, 3], [4]]


def test_a_request_that_fills_half_a_group_stays_alone():
    limits = GroupLimits(max_keys=39, max_logits=1000)
    assert _groups(_plan([1, 1], [20, 20], limits=limits)) == [[0], [1]]


def test_no_groups_where_results_must_not_depend_on_company():
    assert _groups(_plan([1, 1], [20, 20], limits=ALONE)) == [[0], [1]]
    limits = GroupLimits.of(CPU, key_bytes=4, num_heads=1, is_invariant=True)
    assert limits.max_keys == 0


def test_an_accelerator_groups_more_than_a_cpu():
    sizes = {"key_bytes": 4096, "num_heads": 8, "is_invariant": False}
    on_cpu = GroupLimits.of(CPU, **sizes)
    elsewhere = GroupLimits.of(torch.device("cuda"), **sizes)
    assert on_cpu.max_keys == 512
    assert elsewhere.max_keys == 65536
    assert elsewhere.max_logits == 256 * 2**20 // 32


def test_a_group_reads_nothing_past_a_requests_end():
    (tile,) = _plan([1, 1], [11, 9]).tiles
    assert isinstance(tile, GroupTile)
    assert tile.blocks.tolist()[1] == [40] * 4 + [41] * 4 + [42] * 3
    assert tile.offsets.tolist()[1] == [0, 1, 2, 3, 0, 1, 2, 3, 0, 0, 0]
    assert tile.mask is not None
    assert tile.mask[:, 0].tolist() == [[True] * 11, [True] * 9 + [False] * 2]


def test_a_group_in_a_window_starts_at_each_requests_own_first_key():
    (tile,) = _plan([1, 1], [11, 9], window=(3, 0)).tiles
    assert isinstance(tile, GroupTile)
    assert tile.mask is None
    assert tile.key_positions[:, 0].tolist() == [[7, 8, 9, 10], [5, 6, 7, 8]]
    assert tile.blocks.tolist() == [[1, 2, 2, 2], [41, 41, 41, 42]]


def test_drafts_in_a_group_are_causal():
    (tile,) = _plan([2, 2], [5, 5]).tiles
    assert isinstance(tile, GroupTile)
    assert tile.mask is not None
    assert tile.mask[0].tolist() == [[True] * 4 + [False], [True] * 5]


def test_rows_that_lie_side_by_side_are_a_slice():
    (tile,) = _plan([1, 1], [8, 8]).tiles
    assert isinstance(tile, GroupTile)
    assert tile.rows == slice(0, 2)
    tiles = _plan([1, 9, 1], [8, 9, 8]).tiles
    (group,) = (tile for tile in tiles if isinstance(tile, GroupTile))
    assert isinstance(group.rows, torch.Tensor)
    assert group.rows.tolist() == [0, 10]


def test_a_lone_request_names_the_blocks_of_its_window_only():
    (tile,) = _plan([1], [11], window=(3, 0)).tiles
    assert isinstance(tile, RequestTile)
    assert (tile.first_key, tile.stop_key) == (7, 11)
    assert tile.blocks is not None
    assert tile.blocks.tolist() == [1, 2]


def test_another_table_moves_every_tile():
    plan = _plan([1, 1, 9], [8, 8, 9])
    moved = plan.with_table(torch.full((3, 40), 7, dtype=torch.int32), 4)
    assert all(bool((tile.blocks == 7).all()) for tile in moved.tiles)
    assert [tile.blocks.shape for tile in moved.tiles] == [tile.blocks.shape for tile in plan.tiles]


@pytest.mark.parametrize(("limits", "counts"), [(ROOMY, [3, 1, 1]), (ALONE, [1] * 5)])
def test_equal_encoder_requests_side_by_side_are_one_tile(limits, counts):
    lens = [4, 4, 4, 5, 4]
    tiles = _plan(lens, lens, attn_type=AttentionType.ENCODER, limits=limits).tiles
    assert [tile.count for tile in tiles] == counts


def test_side_by_side_ends_where_logits_would_be_too_many():
    limits = GroupLimits(max_keys=1, max_logits=33)
    tiles = _plan([4] * 5, [4] * 5, attn_type=AttentionType.ENCODER, limits=limits).tiles
    assert [tile.count for tile in tiles] == [2, 2, 1]


def test_an_empty_batch_has_no_tiles():
    assert _plan([], []).tiles == ()
    assert _plan([], [], attn_type=AttentionType.ENCODER).tiles == ()
