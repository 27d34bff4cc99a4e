"""Grids: how many programs a step gets, and whether anything is cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attn_shared.arch import parse_arch
from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.spec import LayerSpec
from attn_triton._steps import (
    Composition,
    Planner,
    composition_of,
    is_ragged,
    is_split,
    shape_of,
)
from attn_triton.machine import Machine

H200 = Machine(arch=parse_arch("sm_90"), compute_units=132)


def planner(*, is_invariant: bool = False, heads: tuple[int, int] = (32, 8)) -> Planner:
    layer = LayerSpec(
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_size=128,
        head_size_v=128,
        scale=1.0,
        dtype=torch.bfloat16,
    )
    return Planner(layer, H200, cache_dtype=torch.bfloat16, is_invariant=is_invariant)


def decodes(count: int, tokens: int = 1) -> Composition:
    return Composition(num_decodes=count, decode_tokens=tokens, num_blocks=0)


@pytest.mark.parametrize(
    ("count", "stages", "slots"),
    [
        (1, 3, 33),  # 2 programs a unit: 264 / 8 kv heads
        (33, 3, 0),  # as many requests as slots: nothing is cut
        (34, 2, 66),  # 4 programs a unit, less deep
        (66, 2, 0),
        (67, 3, 0),  # several waves of either
        (256, 3, 0),
    ],
)
def test_a_wave_on_132_units(count: int, stages: int, slots: int) -> None:
    grid = planner().decode_grid(decodes(count), max_seq_len=4096)
    assert (grid.tile.stages, grid.slots, grid.may_split) == (stages, slots, slots > 0)
    assert grid.max_items == max(slots, count) + slots // 4


def test_a_sequence_of_one_tile_is_not_cut() -> None:
    assert not planner().decode_grid(decodes(1), max_seq_len=64).may_split
    assert planner().decode_grid(decodes(1), max_seq_len=65).may_split


def test_rows_of_several_tokens_and_of_many_heads() -> None:
    grid = planner().decode_grid(decodes(2, tokens=4), max_seq_len=4096)
    assert (grid.max_rows, grid.tile.rows, grid.blocks) == (16, 16, 1)
    grid = planner(heads=(71, 1)).decode_grid(decodes(2), max_seq_len=4096)
    assert (grid.max_rows, grid.tile.rows, grid.blocks) == (71, 64, 2)
    assert grid.slots == 132  # two blocks of rows share the 264 places


def test_parts_take_room_for_rows_that_exist() -> None:
    plan = planner()
    grid = plan.decode_grid(decodes(1), max_seq_len=4096)
    assert plan.part_floats(grid) == (41 * 8 * 4 * 128, 41 * 8 * 4 * 2)
    assert plan.part_floats(plan.decode_grid(decodes(100), max_seq_len=4096)) == (0, 0)


def test_invariant_grids_depend_on_no_neighbour() -> None:
    plan = planner(is_invariant=True)
    grids = [plan.decode_grid(decodes(count), max_seq_len=9999) for count in (1, 33, 300)]
    assert {grid.tile for grid in grids} == {grids[0].tile}
    assert [grid.max_items for grid in grids] == [8, 264, 2400]
    assert all(grid.may_split and grid.slots == 0 for grid in grids)
    assert not plan.decode_grid(decodes(1), max_seq_len=512).may_split


@pytest.mark.parametrize(
    ("lens", "is_cut"),
    [
        ([4096] * 32, False),  # 33 slots: with one tile less each would be two
        ([4096] * 16, True),
        ([500] * 15 + [60000], True),
        ([64] * 20, False),
        ([4096] * 31 + [8192], True),  # 31 and 2 parts of 4096
        ([4096] * 32 + [8192], False),  # 34 parts of 8128 and less do not fit
        ([4096] * 20 + [900] * 40 + [8192] * 2, True),  # 40 short ones in 10 slots
    ],
)
def test_what_the_kernels_would_cut(lens: list[int], is_cut: bool) -> None:
    assert is_split(lens, 64, 33) is is_cut


def test_lengths_that_are_known_leave_the_second_kernel_out() -> None:
    uniform = planner().decode_grid(decodes(32), max_seq_len=4096, spans=[4096] * 32)
    assert (uniform.may_split, uniform.slots, uniform.max_items) == (False, 0, 32)
    assert planner().decode_grid(decodes(32), max_seq_len=4096).may_split


def test_one_long_request_among_short_ones_gets_more_parts() -> None:
    ragged = [500] * 15 + [60000]
    assert is_ragged(ragged)
    assert not is_ragged([60000])
    assert not is_ragged([4096] * 32)
    grid = planner().decode_grid(decodes(16), max_seq_len=60000, spans=ragged)
    assert (grid.tile.stages, grid.slots) == (2, 66)


def composition(query_lens: list[int], **options: Any) -> Composition:
    common = CommonAttentionMetadata.from_lengths(
        query_lens=query_lens, seq_lens=[length + 5 for length in query_lens]
    )
    own = {"group": 4, "rows": 128, "most_tokens": 16, "is_cache_free": False, "is_bound": False}
    return composition_of(common, **{**own, **options})


def test_what_a_batch_is_made_of() -> None:
    assert composition([1, 1, 3]) == Composition(num_decodes=3, decode_tokens=3, num_blocks=0)
    # 100 tokens of 4 heads: 400 rows, 4 blocks of 128; 33 tokens: 132 rows, 2 blocks
    mixed = composition([1, 100, 16, 33, 0])
    assert mixed == Composition(num_decodes=2, decode_tokens=16, num_blocks=6)
    assert composition([40, 40]) == Composition(num_decodes=0, decode_tokens=0, num_blocks=4)


def test_a_captured_batch_is_bounded_by_its_requests_and_tokens() -> None:
    bound = composition([1, 100, 16], is_bound=True)
    assert bound == Composition(num_decodes=3, decode_tokens=16, num_blocks=3 + 117 * 4 // 128)
    assert composition([1, 1], is_bound=True).num_blocks == 0


def test_without_a_cache_nothing_decodes() -> None:
    found = composition([1, 5], is_cache_free=True)
    assert found == Composition(num_decodes=0, decode_tokens=0, num_blocks=2)


def test_equal_shapes_are_one_object() -> None:
    tile = planner().prefill
    assert shape_of(None, 0, tile) is shape_of(None, 0, tile)
    assert shape_of(None, 0, tile) is not shape_of(tile, 1, tile)
