"""Which kernel a layer's long prompts run on, and where it reads their keys: one pure function."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum

import torch

from attn_shared.arch import Arch
from attn_shared.quantization import FP8_DTYPES
from attn_shared.request import AttentionType
from attn_shared.spec import LayerSpec
from attn_triton._visibility import CACHE_FREE, visibility_of
from attn_triton.prompt_tiles import HOPPER_PIECE, PromptKernel, PromptTile, prompt_tile
from attn_triton.tiles import Widths

__all__ = [
    "LEAST_TOKENS",
    "MOST_COPIED_BYTES",
    "Context",
    "Fresh",
    "Route",
    "plain_because",
    "portable_because",
    "route_of",
    "tile_of",
    "tile_within",
]

LEAST_TOKENS = 64
"""Query tokens of a step's longest request from which the kernel for long prompts is used: it has
128 rows of one query head, where the plain one packs the heads that share a kv head."""

_FEWEST_KEYS = 64  # of a tile that pages are read by; what is copied instead costs 1 to 8 %

MOST_COPIED_BYTES = 512 * 2**20
"""Of scratch for keys and values that are copied out of small pages: 131072 tokens of 8 heads of
128; past it the plain kernel gathers rows."""


class Context(IntEnum):
    """Where keys of earlier steps are read; the kernel's CONTEXT."""

    NONE = 0
    PAGES = 1
    ROWS = 2


class Fresh(IntEnum):
    """Which keys are read from the tensors of the call; the kernel's FRESH."""

    NONE = 0
    STEP = 1
    ALL = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """How the kernel for long prompts reads keys.

    Attributes:
        context: of earlier steps, or all of them.
        fresh: of this step.
    """

    context: Context
    fresh: Fresh


def plain_because(
    spec: LayerSpec, arch: Arch, cache_dtype: torch.dtype, *, is_invariant: bool
) -> str | None:
    """Return why a layer's prompts run on the plain kernel; None: on the one for long prompts.

    Args:
        spec: of the layer.
        arch: of the device.
        cache_dtype: of keys and values as stored.
        is_invariant: results must not depend on what shares the batch.
    """
    if tile_of(spec, arch) is None:
        sizes = f"head sizes {spec.head_size} and {spec.head_size_v} in {spec.dtype}"
        return f"{sizes} on {arch.canonical} have no tile in attn_triton.prompt_tiles"
    if spec.has_alibi:
        return "ALiBi"
    if not spec.scale > 0:
        return f"scale={spec.scale}, which is not above 0"
    if cache_dtype is not spec.dtype and cache_dtype not in FP8_DTYPES:
        return f"a cache of {cache_dtype}"
    if is_invariant and not _has_whole_tiles(spec, arch, cache_dtype):
        return "batch-invariant mode with pages that must be copied"
    return None


def portable_because(spec: LayerSpec, arch: Arch, *, has_gluon: bool) -> str | None:
    """Return why a layer's long prompts run on the kernel for every GPU; None: on Hopper's.

    Args:
        spec: of the layer, which `plain_because` has nothing against.
        arch: of the device.
        has_gluon: Triton has the language that the kernel for Hopper is written in.
    """
    if tile_of(spec, arch, kernel=PromptKernel.HOPPER) is None:
        sizes = f"head sizes {spec.head_size} and {spec.head_size_v}"
        return f"{sizes} on {arch.canonical} have no tile of the kernel for Hopper"
    seen = visibility_of(spec)
    if seen.left >= 0 or seen.right >= 0:
        return "a window"
    if seen.chunk:
        return "chunked attention"
    if spec.softcap is not None:
        return "softcap"
    if not has_gluon:
        return "Triton before 3.6, or its interpreter, has not the Gluon that it is written in"
    return None


def tile_of(
    spec: LayerSpec,
    arch: Arch,
    *,
    is_few: bool = False,
    kernel: PromptKernel = PromptKernel.PORTABLE,
) -> PromptTile | None:
    """Return the shape of a kernel for long prompts, or None; see `prompt_tile`."""
    widths = Widths(
        head_size=spec.head_size,
        head_size_v=spec.head_size_v,
        element_bytes=spec.dtype.itemsize,
        cache_bytes=spec.dtype.itemsize,
    )
    return prompt_tile(arch, widths, is_few=is_few, kernel=kernel)


def tile_within(tile: PromptTile, page: int) -> PromptTile | None:
    """Return the shape whose tiles are read out of pages; None where these are too small for it."""
    if tile.kernel is PromptKernel.HOPPER:  # which copies a tile from several pages
        return tile if page and page % HOPPER_PIECE == 0 else None
    fitting = (keys for keys in (tile.keys, _FEWEST_KEYS) if page and page % keys == 0)
    keys = next(fitting, None)
    return None if keys is None else replace(tile, keys=min(keys, tile.keys))


def route_of(
    spec: LayerSpec,
    tile: PromptTile,
    *,
    page: int,
    is_stored_alike: bool,
    has_fresh: bool,
    has_context: bool,
    may_copy: bool,
) -> Route | None:
    """Return where the kernel reads keys; None: the plain kernel has to.

    Args:
        spec: of the layer, which `plain_because` has nothing against.
        tile: of the kernel.
        page: tokens per block; 0 without a cache.
        is_stored_alike: the cache has the dtype of the call, so that its descriptors do for both.
        has_fresh: the call brings the step's keys in rows that a descriptor can read, and they are
            what the cache holds, or may stand for it.
        has_context: requests may have keys of earlier steps.
        may_copy: pages may be copied: how many is known, and within `MOST_COPIED_BYTES`.
    """
    if spec.attn_type in CACHE_FREE:
        return Route(context=Context.NONE, fresh=Fresh.ALL) if has_fresh else None
    is_fresh = (
        has_fresh and spec.attn_type is AttentionType.DECODER and (spec.kv_sharing_target is None)
    )
    if is_fresh and not has_context:
        return Route(context=Context.NONE, fresh=Fresh.STEP)
    # Stored keys that are scaled, and fresh ones that are not, have no factor in common.
    fresh = Fresh.STEP if is_fresh and is_stored_alike else Fresh.NONE
    if is_stored_alike and tile_within(tile, page) is not None:
        return Route(context=Context.PAGES, fresh=fresh)
    return Route(context=Context.ROWS, fresh=fresh) if may_copy else None


def _has_whole_tiles(spec: LayerSpec, arch: Arch, cache_dtype: torch.dtype) -> bool:
    """Whether nothing is copied, which a batch could have too much of."""
    tile, block_size = tile_of(spec, arch), getattr(spec.kv_cache_spec, "block_size", 0)
    if tile is None:
        return False
    return spec.attn_type in CACHE_FREE or (
        cache_dtype is spec.dtype and tile_within(tile, block_size) is not None
    )
