"""Gather entries of a cache of latents as dense rows with one Triton launch.

Means what `attn_shared`'s own gather of latents means, bit for bit.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from attn_triton._latent_calls import scale_of
from attn_triton.launch import AddressedLaunch, Launcher
from attn_triton.machine import require_readable
from attn_triton.tiles import next_power_of_2

__all__ = ["gather_latents"]

_TILE_ELEMENTS = 4096


def gather_latents(
    kv_cache: Tensor, slots: Tensor, dtype: torch.dtype, scale: float | Tensor | None = None
) -> Tensor:
    """Return the entries (n, latent_size) of some slots, on the current stream.

    Args:
        kv_cache: (num_blocks, block_size, latent_size), any strides of blocks and tokens.
        slots: (n,) int64.
        dtype: of the result.
        scale: of an fp8 cache: entry = stored * scale; None: the cache is of another kind.

    Raises:
        InvalidInputError: the scale is neither a number nor one element.
        UnsupportedOptionError: a flavour of fp8 that Triton does not read on the device.
    """
    count, width = len(slots), kv_cache.shape[2]
    found = torch.empty(count, width, dtype=dtype, device=kv_cache.device)
    place: Tensor | None = None
    number = 1.0
    if scale is not None:
        require_readable(kv_cache.dtype, kv_cache.device)
        place, number = scale_of(scale, kv_cache.device)
    block, token = kv_cache.stride()[:2]
    launch, rows = _launch(
        (width, kv_cache.shape[1], block, token), (kv_cache.dtype, dtype), scale is not None
    )
    launch((-(-count // rows), 1, 1), (kv_cache, slots.contiguous(), found, place), (count, number))
    return found


@functools.lru_cache(maxsize=1024)
def _launch(
    sizes: tuple[int, int, int, int], dtypes: tuple[torch.dtype, torch.dtype], is_scaled: bool
) -> tuple[AddressedLaunch, int]:
    """Return the launch for caches of these sizes and strides, and the rows of a program."""
    from attn_triton.kernels.gather_latents import gather_latents as kernel

    del dtypes  # one launch for each pair: it keeps what was compiled for them
    width, page, block, token = sizes
    padded = next_power_of_2(width)
    rows = max(1, _TILE_ELEMENTS // padded)
    constants = {
        "WIDTH": width,
        "PADDED": padded,
        "PAGE": page,
        "BLOCK_STRIDE": block,
        "TOKEN_STRIDE": token,
        "IS_SCALED": is_scaled,
        "ROWS": rows,
    }
    return AddressedLaunch(Launcher(kernel, constants)), rows
