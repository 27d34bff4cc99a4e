"""Where a cache of latents is, in numbers: no reference keeps alive what its owner frees."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attn_triton.latent_route import LatentRoute
from attn_triton.tiles import Tile

__all__ = ["LatentCache", "LatentCaches"]

_ALIGNMENT = 16  # bytes that addresses and strides of a descriptor are a multiple of
_MOST_CACHES = 64  # that a layer remembers; it has one, and benchmarks a few


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentCache:
    """A cache (blocks, page, latent + rope), its last dimension dense.

    Attributes:
        address: of its first entry.
        num_blocks: blocks.
        strides: from one block to the next and from one token to the next, in elements.
        page: tokens per block.
        dtype: of the elements.
        device: where it is.
        chosen: for shapes of programs, which kernel reads the cache, and its descriptors.
    """

    address: int
    num_blocks: int
    strides: tuple[int, int]
    page: int
    dtype: torch.dtype
    device: torch.device
    chosen: dict[Tile, tuple[LatentRoute, tuple[Any, Any]]] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )

    def can_be_described(self, keys: int, latent: int) -> bool:
        """Return whether tiles of so many keys can be read by tensor descriptors.

        A tile must lie in one block, blocks on the grid of tokens, and both parts of an entry at
        multiples of 16 bytes.

        Args:
            keys: of a tile.
            latent: width of the latent part.
        """
        block, token = self.strides
        size = self.dtype.itemsize
        places = (self.address, token * size, latent * size)
        is_grid = token > 0 and block % token == 0 and self.num_blocks > 0
        return self.page % keys == 0 and is_grid and not any(at % _ALIGNMENT for at in places)

    def tiles(
        self,
        kv_cache: Tensor,
        keys: int,
        widths: tuple[int, int],
        padded: tuple[int, int],
        route: LatentRoute,
    ) -> tuple[Any, Any]:
        """Return descriptors of the latents and of the rope parts, as rows of tokens.

        Args:
            kv_cache: the cache itself.
            keys: rows of a tile.
            widths: of both parts.
            padded: columns of a tile of each; those past the widths are read as 0.
            route: for which kernel.
        """
        describe = _describer(route)

        block, token = self.strides
        rows = (self.num_blocks - 1) * (block // token) + self.page
        parts = (kv_cache, kv_cache[..., widths[0] :])
        latent, rope = (
            describe(part, part.data_ptr(), [rows, width], token, (keys, columns))
            for part, width, columns in zip(parts, widths, padded, strict=True)
        )
        return latent, rope


def _describer(route: LatentRoute) -> Any:
    if route is LatentRoute.HOPPER:
        from attn_triton.kernels.describing_hopper import described_for_hopper

        return described_for_hopper
    from attn_triton.kernels.describing import described

    return described


class LatentCaches:
    """Remembers one layer's caches."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[weakref.ref[Tensor], LatentCache]] = {}

    def read(self, kv_cache: Tensor) -> LatentCache:
        """Return where a cache is."""
        address = kv_cache.data_ptr()
        found = self._seen.get(address)
        if found is not None and found[0]() is kv_cache:
            return found[1]
        if len(self._seen) >= _MOST_CACHES:
            self._seen.clear()
        cache = LatentCache(
            address=address,
            num_blocks=len(kv_cache),
            strides=(kv_cache.stride(0), kv_cache.stride(1)),
            page=kv_cache.shape[1],
            dtype=kv_cache.dtype,
            device=kv_cache.device,
        )
        self._seen[address] = (weakref.ref(kv_cache), cache)
        return cache
