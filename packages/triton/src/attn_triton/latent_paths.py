"""Which of the kernels over latents a request would run on, by the functions that choose them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attn_shared.device import DeviceFacts
from attn_shared.dtypes import kv_storage_dtype
from attn_shared.kernel_paths import KernelPath
from attn_shared.mla_paths import decode_path
from attn_shared.request import AttentionRequest, MLADims
from attn_triton._latent_builder import TritonMLAMetadataBuilder
from attn_triton.kernel_paths import arch_of
from attn_triton.latent_route import LatentRoute, latent_route
from attn_triton.latent_tiles import LatentWidths, latent_tile

if TYPE_CHECKING:
    from attn_shared.inventory import Inventory

__all__ = ["has_gluon_in", "latent_paths_of"]

_FIRST_GLUON = (3, 6)
_ALIGNMENT = 16
_KERNELS = {
    LatentRoute.ROWS: "the portable kernel, each key's row by its own pointer",
    LatentRoute.TILES: "the portable kernel, tiles by tensor descriptors",
    LatentRoute.HOPPER: "the kernel for many rows on Hopper, in Gluon",
}


def has_gluon_in(inventory: Inventory) -> bool:
    """Whether kernels in Gluon run by the Triton that is installed, or assumed to be."""
    version = inventory.get("triton").version
    if not version:
        return True
    major, minor = version.split(".")[:2]
    return (int(major), int(minor)) >= _FIRST_GLUON


def latent_paths_of(
    request: AttentionRequest, device: DeviceFacts, inventory: Inventory
) -> tuple[KernelPath, ...]:
    """Return the ways of decodes of one query token and of the most that a decode has.

    The cache is taken for one that its spec allocates: descriptors read it where tiles lie in one
    block.

    Args:
        request: one that TRITON_MLA serves, with the block size that it would get.
        device: where it would run.
        inventory: which Triton is installed.
    """
    builder = TritonMLAMetadataBuilder
    most = builder.most_decode_tokens()
    first = _way(request, device, inventory, 1)
    if request.batch_invariant:  # the shape must not depend on the company
        return (decode_path(builder, *first),)
    last = _way(request, device, inventory, most or builder.decode_threshold)
    if first[0] == last[0]:
        return (decode_path(builder, *first),)
    return (
        KernelPath(rows="decodes of one token", kernel=first[0], why=first[1]),
        decode_path(builder, *last, rows="decodes of more tokens"),
    )


def _way(
    request: AttentionRequest, device: DeviceFacts, inventory: Inventory, tokens: int
) -> tuple[str, str]:
    """Return the kernel of requests of so many query tokens, and why it is that one."""
    dims, arch = request.mla or MLADims(), arch_of(device)
    flavour = device.fp8_dtype or torch.float8_e4m3fn
    stored = kv_storage_dtype(request.kv_cache_dtype, request.dtype, flavour)
    widths = LatentWidths(
        latent=dims.kv_lora_rank,
        rope=dims.qk_rope_head_dim,
        element_bytes=request.dtype.itemsize,
        cache_bytes=stored.itemsize,
    )
    rows = request.num_heads * tokens
    tile, page = latent_tile(arch, widths, rows), request.block_size or 1
    parts = (dims.kv_lora_rank * stored.itemsize, dims.latent_size * stored.itemsize)
    in_block = page % tile.keys == 0
    is_aligned = not any(part % _ALIGNMENT for part in parts)
    route = latent_route(
        arch,
        tile,
        request.dtype,
        stored,
        widths.padded,
        is_describable=in_block and is_aligned,
        has_gluon=has_gluon_in(inventory),
    )
    why = f"tiles of {tile.rows} query rows and {tile.keys} keys on {arch.canonical}"
    if not in_block:
        why += f", which pages of {page} do not hold whole"
    return _KERNELS[route], why
