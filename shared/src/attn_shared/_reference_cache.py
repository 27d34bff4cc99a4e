"""The reference's view of a paged cache: which slots a request owns, and what they hold."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attn_shared.errors import InvalidInputError, UnsupportedOptionError
from attn_shared.quantization import FP8_DTYPES

__all__ = ["PLAIN_DTYPES", "PagedCache", "latent_views"]

PLAIN_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Dtypes whose elements are numbers as they stand."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PagedCache:
    """Keys and values in blocks, as stored, with what turns them back into numbers.

    Attributes:
        key_cache: (num_blocks, block_size, Hkv, D), any strides.
        value_cache: (num_blocks, block_size, Hkv, Dv), any strides.
        block_table: integers (rows >= B, M).
        k_scale: per tensor, or per head (Hkv,).
        v_scale: the same for values.
        key_scales: float32 (num_blocks, block_size, Hkv), one per token and head, or None.
        value_scales: the same for values.
    """

    key_cache: Tensor
    value_cache: Tensor
    block_table: Tensor
    k_scale: float | Tensor
    v_scale: float | Tensor
    key_scales: Tensor | None
    value_scales: Tensor | None

    def __post_init__(self) -> None:
        """Refuse scales that do not belong to the cache's dtype."""
        if self.key_cache.dim() != 4 or self.value_cache.dim() != 4:
            raise InvalidInputError.for_argument(
                "key_cache.shape, value_cache.shape",
                (tuple(self.key_cache.shape), tuple(self.value_cache.shape)),
                "(num_blocks, block_size, Hkv, head_size)",
            )
        _check_scales("k", self.key_cache, self.k_scale, self.key_scales)
        _check_scales("v", self.value_cache, self.v_scale, self.value_scales)

    def read(self, request: int, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return key (length, Hkv, D) and value (length, Hkv, Dv) of a request, dequantised.

        Nothing is read of table entries past the last used one, of slots past `length`, or of
        blocks that the row does not name.
        """
        blocks = self._blocks(request, length)
        key = _gather(self.key_cache, blocks, length).to(dtype)
        value = _gather(self.value_cache, blocks, length).to(dtype)
        key = key * _scales(self.k_scale, self.key_scales, blocks, key)
        value = value * _scales(self.v_scale, self.value_scales, blocks, value)
        return key, value

    def _blocks(self, request: int, length: int) -> Tensor:
        num_blocks, block_size = self.key_cache.shape[:2]
        used = -(-length // block_size)
        if used > self.block_table.shape[1]:
            raise InvalidInputError.for_argument(
                f"seq_lens[{request}]",
                length,
                f"<= {self.block_table.shape[1] * block_size}, what a row of block_table addresses",
            )
        blocks = self.block_table[request, :used].long().to(self.key_cache.device)
        if used and not 0 <= int(blocks.min()) <= int(blocks.max()) < num_blocks:
            raise InvalidInputError.for_argument(
                f"block_table[{request}, :{used}]", blocks.tolist(), f"ids in 0..{num_blocks - 1}"
            )
        return blocks


def latent_views(latent_cache: Tensor, kv_lora_rank: int) -> tuple[Tensor, Tensor]:
    """Return the latent cache as key and value caches of one head."""
    if latent_cache.dim() != 3 or not 0 < kv_lora_rank <= latent_cache.shape[-1]:
        raise InvalidInputError.for_argument(
            "latent_cache.shape, kv_lora_rank",
            (tuple(latent_cache.shape), kv_lora_rank),
            "(num_blocks, block_size, entry) with 0 < kv_lora_rank <= entry",
        )
    key_cache = latent_cache.unsqueeze(2)
    return key_cache, key_cache[..., :kv_lora_rank]


def _check_scales(side: str, cache: Tensor, scale: float | Tensor, scales: Tensor | None) -> None:
    """Refuse a scale that the cache's dtype does not have, and a missing one that it needs."""
    plain, fp8 = cache.dtype in PLAIN_DTYPES, cache.dtype in FP8_DTYPES
    if not (plain or fp8 or cache.dtype == torch.int8):
        raise UnsupportedOptionError(
            f"a {side} cache of {cache.dtype} does not say what its bytes mean.",
            hint="view it as its fp8 dtype, or pass a floating or int8 cache.",
        )
    own, kv_heads = f"{side}_scale", cache.shape[2]
    is_one = not isinstance(scale, Tensor) and scale == 1.0
    if isinstance(scale, Tensor):
        is_one = bool((scale == 1).all())
        if scale.numel() != 1 and scale.shape != (kv_heads,):
            raise InvalidInputError.for_argument(
                f"{own}.shape", tuple(scale.shape), f"one element or ({kv_heads},)"
            )
    if not is_one and (not fp8 or scales is not None):
        raise InvalidInputError.for_argument(
            own, scale, f"1.0 with a cache of {cache.dtype} or with scales per token and head"
        )
    if scales is None and cache.dtype == torch.int8:
        raise InvalidInputError.for_argument(
            f"{side} scales per token and head", None, "a tensor with an int8 cache"
        )
    if scales is not None and (plain or scales.shape != cache.shape[:3]):
        raise InvalidInputError.for_argument(
            f"{side} scales per token and head",
            tuple(scales.shape),
            f"None, or {tuple(cache.shape[:3])} with a quantised cache",
        )


def _gather(cache: Tensor, blocks: Tensor, length: int) -> Tensor:
    """Return the first `length` slots (length, ...) of the blocks in order."""
    return cache[blocks].flatten(0, 1)[:length]


def _scales(scale: float | Tensor, scales: Tensor | None, blocks: Tensor, values: Tensor) -> Tensor:
    """Return what multiplies stored values (length, Hkv, D), broadcastable over them.

    A float is taken in float32, as every kernel receives it.
    """
    if scales is not None:
        return _gather(scales, blocks, len(values)).to(values).unsqueeze(-1)
    per_head = torch.as_tensor(scale, dtype=torch.float32).to(values)
    return per_head.reshape(-1, 1) if per_head.numel() > 1 else per_head.reshape(())
