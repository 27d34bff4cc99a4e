"""Which kernel decodes over latents, and how tiles reach it: one pure choice, before any launch."""

from __future__ import annotations

from enum import StrEnum

import torch

from attn_shared.arch import Arch
from attn_triton.latent_tiles import latent_row
from attn_triton.tiles import Tile

__all__ = ["LatentRoute", "latent_route"]

_HOPPER_TILE = (64, 64, 8)  # rows, keys and warps that the kernel for Hopper is written for
_HOPPER_WIDTHS = (512, 64)


class LatentRoute(StrEnum):
    """How a call is decoded."""

    ROWS = "rows"
    """The portable kernel, each key's row by its own pointer."""
    TILES = "tiles"
    """The portable kernel, tiles by tensor descriptors."""
    HOPPER = "hopper"
    """The kernel for many rows on Hopper, tiles by tensor descriptors."""


def latent_route(
    arch: Arch,
    tile: Tile,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    padded: tuple[int, int],
    *,
    is_describable: bool,
    has_gluon: bool,
) -> LatentRoute:
    """Return how calls of this kind are decoded.

    Args:
        arch: the architecture.
        tile: of a program.
        dtype: of queries.
        cache_dtype: of the cache's elements.
        padded: widths of latent and rope part, as tiles have them.
        is_describable: a tile lies in one block, at places that descriptors take.
        has_gluon: Triton has the language of the kernel for Hopper.
    """
    has_descriptors = latent_row(arch.family).has_descriptors
    if not has_descriptors or not is_describable or dtype is torch.float32:
        return LatentRoute.ROWS
    is_written_for = (
        arch.family == "hopper"
        and (tile.rows, tile.keys, tile.num_warps) == _HOPPER_TILE
        and padded == _HOPPER_WIDTHS
        and cache_dtype is dtype
    )
    if is_written_for and has_gluon:
        return LatentRoute.HOPPER
    return LatentRoute.TILES
