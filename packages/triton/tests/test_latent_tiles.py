"""Launch parameters over latents, and which kernel a call takes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attn_shared.arch import parse_arch
from attn_triton.latent_route import LatentRoute, latent_route
from attn_triton.latent_tiles import (
    LatentWidths,
    latent_row,
    latent_shared_bytes,
    latent_tile,
    least_latent_bytes,
)
from attn_triton.tiles import Tile
from attn_triton.variants import ARCHITECTURES

DEEPSEEK = LatentWidths(latent=512, rope=64, element_bytes=2, cache_bytes=2)


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("rows", [1, 16, 17, 128, 1024])
@pytest.mark.parametrize("bytes_of", [(2, 2), (2, 1), (4, 4), (4, 1)], ids=str)
def test_every_tile_fits(name: str, rows: int, bytes_of: tuple[int, int]) -> None:
    arch = parse_arch(name)
    widths = LatentWidths(latent=512, rope=64, element_bytes=bytes_of[0], cache_bytes=bytes_of[1])
    tile = latent_tile(arch, widths, rows)
    assert arch.shared_memory_bytes is not None
    assert latent_shared_bytes(tile, widths) <= arch.shared_memory_bytes
    assert tile.rows >= 16
    assert tile.keys >= 16


def test_widths_are_padded_to_powers_of_two() -> None:
    assert LatentWidths(latent=144, rope=8, element_bytes=2, cache_bytes=2).padded == (256, 16)


def test_rows_decide_on_hopper() -> None:
    hopper = parse_arch("sm_90")
    assert latent_tile(hopper, DEEPSEEK, 16) == latent_row("hopper").few
    assert latent_tile(hopper, DEEPSEEK, 17) == latent_row("hopper").many


def test_an_unknown_architecture_gets_small_tiles() -> None:
    tile = latent_tile(parse_arch("gfx1999"), DEEPSEEK, 128)
    assert (tile.rows, tile.keys) == (16, 16)
    assert least_latent_bytes(DEEPSEEK) == latent_shared_bytes(replace(tile, stages=1), DEEPSEEK)


MANY = latent_row("hopper").many
FEW = latent_row("hopper").few


@pytest.mark.parametrize(
    ("arch", "tile", "dtypes", "is_describable", "has_gluon", "route"),
    [
        ("sm_90", MANY, ("bfloat16", "bfloat16"), True, True, LatentRoute.HOPPER),
        ("sm_90", MANY, ("float16", "float16"), True, True, LatentRoute.HOPPER),
        ("sm_90", MANY, ("bfloat16", "bfloat16"), True, False, LatentRoute.TILES),
        ("sm_90", MANY, ("bfloat16", "bfloat16"), False, True, LatentRoute.ROWS),
        ("sm_90", MANY, ("bfloat16", "float8_e4m3fn"), True, True, LatentRoute.TILES),
        ("sm_90", MANY, ("float32", "float32"), True, True, LatentRoute.ROWS),
        ("sm_90", FEW, ("bfloat16", "bfloat16"), True, True, LatentRoute.TILES),
        ("sm_100", MANY, ("bfloat16", "bfloat16"), True, True, LatentRoute.TILES),
        ("sm_80", FEW, ("bfloat16", "bfloat16"), True, True, LatentRoute.ROWS),
        ("gfx942", FEW, ("bfloat16", "bfloat16"), True, True, LatentRoute.ROWS),
    ],
)
def test_which_kernel_decodes(
    arch: str,
    tile: Tile,
    dtypes: tuple[str, str],
    is_describable: bool,
    has_gluon: bool,
    route: LatentRoute,
) -> None:
    query, cache = (getattr(torch, name) for name in dtypes)
    found = latent_route(
        parse_arch(arch),
        tile,
        query,
        cache,
        (512, 64),
        is_describable=is_describable,
        has_gluon=has_gluon,
    )
    assert found is route


def test_the_kernel_for_hopper_is_for_deepseeks_widths() -> None:
    found = latent_route(
        parse_arch("sm_90"),
        MANY,
        torch.bfloat16,
        torch.bfloat16,
        (256, 64),
        is_describable=True,
        has_gluon=True,
    )
    assert found is LatentRoute.TILES
