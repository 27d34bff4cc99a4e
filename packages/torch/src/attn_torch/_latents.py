"""Reads a cache of latents: one kv head, whose values are the first columns of its keys."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attn_shared.dtypes import KVQuantMode
from attn_shared.errors import MetadataError
from attn_shared.kv_cache import MLAAttentionSpec
from attn_shared.quantization import dequantize_fp8
from attn_torch._cache_reader import KeysValues, gather_blocks, gather_tokens
from attn_torch._plan import GroupTile, RequestTile

__all__ = ["LatentReader"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LatentReader:
    """One layer's cache of latents, as one step reads it.

    Attributes:
        kv_cache: (num_blocks, block_size, latent_size).
        spec: of the cache.
        dtype: of the result.
        scale: entry = stored * scale in an fp8 cache.
    """

    kv_cache: Tensor
    spec: MLAAttentionSpec
    dtype: torch.dtype
    scale: float | Tensor

    def read(self, tile: RequestTile | GroupTile) -> KeysValues:
        """Return a tile's keys (R, L, 1, latent_size), and their latents as values."""
        view = self.spec.split(self.kv_cache).key
        if isinstance(tile, GroupTile):
            stored = gather_tokens(view, tile.blocks, tile.offsets)
        else:
            if tile.blocks is None:
                raise MetadataError.for_argument("metadata", "without blocks", "of a cache")
            offset = tile.first_key // view.shape[1] * view.shape[1]
            wanted = slice(tile.first_key - offset, tile.stop_key - offset)
            stored = gather_blocks(view, tile.blocks)[wanted].unsqueeze(0)
        if self.spec.quant_mode is KVQuantMode.FP8_PER_TENSOR:
            stored = dequantize_fp8(stored, self.scale, self.dtype)
        key = stored.to(self.dtype)
        return KeysValues(key, key[..., : self.spec.kv_lora_rank])
