"""NVFP4: 4 bits per value, a scale of 8 bits for each 16 of them, and a number for the tensor.

value = e2m1 * block scale * scale, where the block scale is float8_e4m3fn and the last factor the
layer's k_scale or v_scale. Two values share a byte, the first in the low half. In a cache, the
values of one head lie in a row over the tokens of a block, and their block scales in a row behind
them, which is what trtllm-gen's kernels load.

Sources: the OCP Microscaling specification (e2m1); FlashInfer's description of `kv_cache_sf`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attn_shared.errors import InvalidInputError

__all__ = ["BLOCK", "E2M1_VALUES", "dequantize_nvfp4", "quantize_nvfp4", "split_nvfp4"]

BLOCK = 16
"""Values that share a block scale."""

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""What the codes 0 to 7 mean; 8 to 15 are their negatives."""

# Halfway between neighbours; a tie goes to the code that is even.
_BOUNDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_SIGN = 8
_E2M1_MAX = 6.0
_E4M3_MAX = 448.0


def quantize_nvfp4(x: Tensor, scale: float | Tensor) -> tuple[Tensor, Tensor]:
    """Return packed values and block scales.

    A block's scale is that which its largest magnitude needs, rounded to e4m3; a block of zeros has
    scale 0. Magnitudes beyond what fits saturate.

    Args:
        x: (..., D), any floating dtype, D a multiple of 16.
        scale: of the tensor, a positive number or a tensor of one.

    Returns:
        uint8 (..., D / 2), and float8_e4m3fn (..., D / 16).

    Raises:
        InvalidInputError: D is no multiple of 16.
    """
    if x.shape[-1] % BLOCK:
        raise InvalidInputError.for_argument("head size", x.shape[-1], f"a multiple of {BLOCK}")
    blocks = x.float().unflatten(-1, (-1, BLOCK)) / scale
    wanted = (blocks.abs().amax(-1) / _E2M1_MAX).clamp(max=_E4M3_MAX)
    scales = wanted.to(torch.float8_e4m3fn)
    divisor = scales.float().unsqueeze(-1)
    shares = torch.where(divisor > 0, blocks / divisor, 0.0)
    codes = _codes(shares).flatten(-2).unflatten(-1, (-1, 2))
    return codes[..., 0] | (codes[..., 1] << 4), scales


def _codes(shares: Tensor) -> Tensor:
    """Return the code of the nearest e2m1 value, ties to even, as uint8."""
    magnitudes = shares.abs()
    codes = torch.zeros_like(magnitudes, dtype=torch.uint8)
    for lower, bound in enumerate(_BOUNDS):
        # From an odd code a tie goes up, from an even one it stays.
        is_above = magnitudes >= bound if lower % 2 else magnitudes > bound
        codes += is_above
    return torch.where(shares < 0, codes | _SIGN, codes)


def dequantize_nvfp4(
    packed: Tensor, scales: Tensor, scale: float | Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return the values that packed ones and their block scales stand for.

    Args:
        packed: uint8 (..., D / 2).
        scales: float8_e4m3fn (..., D / 16).
        scale: as in `quantize_nvfp4`.
        dtype: of the result.

    Raises:
        InvalidInputError: shapes or dtypes do not belong together.
    """
    wanted = (*packed.shape[:-1], packed.shape[-1] * 2 // BLOCK)
    if packed.dtype is not torch.uint8 or scales.dtype is not torch.float8_e4m3fn:
        raise InvalidInputError.for_argument(
            "dtypes", (packed.dtype, scales.dtype), "torch.uint8 and torch.float8_e4m3fn"
        )
    if tuple(scales.shape) != wanted:
        raise InvalidInputError.for_argument("scales.shape", tuple(scales.shape), str(wanted))
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
    values = torch.tensor(E2M1_VALUES, device=packed.device)[(codes & 7).long()]
    values = torch.where(codes >= _SIGN, -values, values)
    factors = scales.float().repeat_interleave(BLOCK, dim=-1) * scale
    return (values * factors).to(dtype)


def split_nvfp4(side: Tensor, head_size: int) -> tuple[Tensor, Tensor]:
    """Cut the bytes of keys or of values in two: where the numbers lie, and their block scales.

    Args:
        side: uint8 (num_blocks, block_size, Hkv, D / 2 + D / 16), heads outermost in a block.
        head_size: D.

    Returns:
        Views: uint8 (num_blocks, block_size, Hkv, D / 2), float8_e4m3fn (..., D / 16).
    """
    values, scales = head_size // 2, head_size // BLOCK
    num_blocks, tokens, heads, _ = side.shape
    page, head, start = side.stride(0), side.stride(2), side.storage_offset()
    shape = (num_blocks, tokens, heads)
    packed = side.as_strided((*shape, values), (page, values, head, 1), start)
    behind = side.as_strided((*shape, scales), (page, scales, head, 1), start + tokens * values)
    return packed, behind.view(torch.float8_e4m3fn)
