"""Launch parameters: what fits, and what is made smaller until it does."""

from __future__ import annotations

import pytest

from attn_shared.arch import parse_arch
from attn_triton.tiles import (
    Tile,
    Widths,
    combine_warps,
    decode_tiles,
    launch_row,
    least_shared_bytes,
    next_power_of_2,
    prefill_tile,
    shared_bytes,
)
from attn_triton.variants import ARCHITECTURES

BF16 = Widths(head_size=128, head_size_v=128, element_bytes=2, cache_bytes=2)


def widths(size: int, element: int = 2, cache: int | None = None) -> Widths:
    return Widths(
        head_size=size, head_size_v=size, element_bytes=element, cache_bytes=cache or element
    )


@pytest.mark.parametrize(("number", "power"), [(1, 1), (2, 2), (3, 4), (16, 16), (17, 32)])
def test_next_power_of_2(number: int, power: int) -> None:
    assert next_power_of_2(number) == power


def test_widths_are_padded_to_powers_of_two_of_16_at_least() -> None:
    odd = Widths(head_size=96, head_size_v=1, element_bytes=2, cache_bytes=2)
    assert odd.padded == (128, 16)


def test_shared_memory_of_the_measured_decode_shapes() -> None:
    """72 and 39 KiB are what Triton takes for them: 2 and 1 buffers of 32 KiB, Q and P."""
    deep, full = decode_tiles(parse_arch("sm_90"), BF16, 4)
    assert (deep.stages, shared_bytes(deep, BF16)) == (3, 71680)
    assert (full.stages, shared_bytes(full, BF16)) == (2, 38912)
    assert (deep.programs_per_unit, full.programs_per_unit) == (2, 4)


def test_a_cache_of_another_dtype_needs_room_for_what_it_becomes() -> None:
    tile = Tile(rows=64, keys=64, num_warps=4, stages=2)
    plain = 64 * 256 * 2 + 64 * (128 + 64) * 2
    assert shared_bytes(tile, BF16) == plain
    assert shared_bytes(tile, widths(128, 2, 1)) == plain + 64 * 256
    few = Tile(rows=16, keys=64, num_warps=4, stages=3)  # 38912 is what Triton takes for it
    assert shared_bytes(few, widths(128, 2, 1)) == 38912


@pytest.mark.parametrize(("rows", "expected"), [(1, 16), (16, 16), (17, 32), (40, 64), (500, 64)])
def test_rows_of_a_decode_tile(rows: int, expected: int) -> None:
    assert decode_tiles(parse_arch("sm_90"), BF16, rows)[0].rows == expected


def test_wide_heads_get_fewer_rows() -> None:
    assert decode_tiles(parse_arch("sm_90"), widths(512), 64)[0].rows == 16
    assert prefill_tile(parse_arch("sm_90"), BF16).rows == 128
    assert prefill_tile(parse_arch("sm_90"), widths(512)).rows == 32


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("size", [16, 64, 128, 256, 512])
@pytest.mark.parametrize(("element", "cache"), [(2, 2), (2, 1), (4, 4)])
def test_every_tile_fits_where_the_smallest_does(
    arch: str, size: int, element: int, cache: int
) -> None:
    own, facts = widths(size, element, cache), parse_arch(arch)
    limit = facts.shared_memory_bytes
    assert limit is not None
    tiles = [*decode_tiles(facts, own, 16), prefill_tile(facts, own)]
    fits = [shared_bytes(tile, own) <= limit for tile in tiles]
    assert all(fits) == (least_shared_bytes(own) <= limit)
    assert all(tile.rows >= 16 and tile.keys >= 16 for tile in tiles)


def test_a_wave_holds_what_shared_memory_has_room_for() -> None:
    deep, _ = decode_tiles(parse_arch("sm_120"), BF16, 4)
    assert deep.programs_per_unit * shared_bytes(deep, BF16) <= 99 * 1024


def test_an_fp8_cache_is_read_by_longer_tiles_on_hopper() -> None:
    own = Widths(head_size=128, head_size_v=128, element_bytes=2, cache_bytes=1, is_fp8=True)
    deep, full = decode_tiles(parse_arch("sm_90"), own, 4)
    assert (deep.keys, deep.stages) == (128, 3)
    assert full == deep
    assert decode_tiles(parse_arch("sm_90"), own, 32)[0].keys == 64
    assert decode_tiles(parse_arch("sm_100"), own, 4)[0].keys == 64


def test_narrow_heads_are_read_by_longer_tiles_on_hopper() -> None:
    """As many bytes as at heads of 128; measured with 16 rows in waves of few programs."""
    hopper = parse_arch("sm_90")
    deep, full = decode_tiles(hopper, widths(64, 2), 4)
    assert (deep.keys, deep.stages, deep.programs_per_unit) == (128, 3, 2)
    assert full.keys == 64
    assert decode_tiles(hopper, widths(64, 2), 32)[0].keys == 64
    assert decode_tiles(hopper, widths(96, 2), 4)[0].keys == 64
    assert decode_tiles(hopper, widths(64, 4), 4)[0].keys == 32
    assert decode_tiles(parse_arch("sm_100"), widths(64, 2), 4)[0].keys == 64


def test_float32_products_run_on_small_tiles() -> None:
    tile = prefill_tile(parse_arch("sm_90"), widths(128, 4))
    assert (tile.rows, tile.keys, tile.max_registers) == (32, 32, None)


@pytest.mark.parametrize(("width", "warps"), [(16, 1), (128, 1), (256, 2), (512, 4)])
def test_a_thread_that_merges_holds_four_columns_of_all_parts(width: int, warps: int) -> None:
    assert combine_warps(width) == warps


def test_every_row_says_where_it_comes_from() -> None:
    families = ("hopper", "ampere", "blackwell", "cdna3", "rdna3", "xe2", "no such family")
    rows = {family: launch_row(family) for family in families}
    assert rows["hopper"].provenance.startswith("H200")
    others = [row.provenance for family, row in rows.items() if family != "hopper"]
    assert all("not run on hardware" in words for words in others)
    assert rows["xe2"] is rows["no such family"]
