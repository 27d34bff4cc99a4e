"""How KV-cache entries are quantised, as arithmetic on tensors.

fp8: stored = value / scale, saturating; value = stored * scale. int8 per token and head:
symmetric, scale = max abs / 127, kept in float32 beside each entry. The bit format of an fp8
tensor is its torch dtype: e4m3fn and e4m3fnuz differ in range (448, 240) and in what their bits
mean, so that a tensor of one must never be viewed as the other.
"""

from __future__ import annotations

from numbers import Real

import torch
from torch import Tensor

from attn_shared._fields import FLOAT32_LEAST, FLOAT32_MOST
from attn_shared.argument_checks import require_floats
from attn_shared.errors import InvalidInputError

__all__ = [
    "FP8_DTYPES",
    "INT8_MAX",
    "dequantize_fp8",
    "dequantize_int8_per_token_head",
    "quantize_fp8",
    "quantize_int8_per_token_head",
]

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2)
"""The fp8 formats of a KV cache; their largest finite values are 448, 240 and 57344."""

INT8_MAX = 127
"""Largest magnitude that the symmetric int8 format stores; -128 is never written."""


def quantize_fp8(x: Tensor, scale: float | Tensor, dtype: torch.dtype) -> Tensor:
    """Return `x / scale` rounded to nearest and clamped to the finite range of `dtype`.

    A finite or infinite input never becomes NaN or infinite; NaN stays NaN. The quotient is taken
    in float32.

    Args:
        x: (..., H, D), any floating dtype.
        scale: per tensor (a float or a one-element tensor) or per head (H,), positive. The
            contents of a tensor are not looked at, so that this can be captured in a graph.
        dtype: one of `FP8_DTYPES`.

    Raises:
        InvalidInputError: `dtype` is no fp8 format of a cache, or `scale` is not positive and
            finite, or has a shape that fits neither.
    """
    _check_fp8(dtype)
    require_floats("x", x)
    limit = torch.finfo(dtype).max
    divisor = _per_head_scale(x, scale)
    if not isinstance(divisor, Tensor):  # GPUs multiply by the reciprocal of a number
        divisor = x.new_full((), divisor, dtype=torch.float32)
    quotient = x.float() / divisor
    # Casts out of range differ by format (448, NaN, inf), so saturation is spelled out.
    return quotient.clamp(-limit, limit).to(dtype)


def dequantize_fp8(
    stored: Tensor, scale: float | Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return `stored * scale` in `dtype`, computed in `dtype` but never below float32.

    Args:
        stored: (..., H, D) of one of `FP8_DTYPES`.
        scale: as in `quantize_fp8`.
        dtype: of the result.

    Raises:
        InvalidInputError: `stored` is not fp8, or `scale` does not fit.
    """
    _check_fp8(stored.dtype)
    wide = torch.promote_types(dtype, torch.float32)
    return (stored.to(wide) * _per_head_scale(stored, scale)).to(dtype)


def quantize_int8_per_token_head(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise the last dimension with one scale per remaining index.

    Rows of zeros get scale 0 and stored zeros, so that they read back as zeros.

    Args:
        x: (..., D), finite, any floating dtype.

    Raises:
        InvalidInputError: `x` is no tensor of floats, or has no last dimension.

    Returns:
        Stored int8 (..., D), rounded half to even, and scale float32 (...).
    """
    require_floats("x", x)
    if not x.dim() or not x.shape[-1]:
        raise InvalidInputError.for_argument("x shape", tuple(x.shape), "(..., D) with D >= 1")
    values = x.float()
    # By a tensor: GPUs multiply by the reciprocal of a number, which is another scale in 1 of 20.
    scale = values.abs().amax(-1) / values.new_full((), INT8_MAX)
    divisor = torch.where(scale > 0, scale, 1.0).unsqueeze(-1)
    stored = (values / divisor).round().clamp(-INT8_MAX, INT8_MAX)
    return stored.to(torch.int8), scale


def dequantize_int8_per_token_head(
    stored: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return `stored * scale` in `dtype`, computed in `dtype` but never below float32.

    Args:
        stored: int8 (..., D).
        scale: float32 (...).
        dtype: of the result.

    Raises:
        InvalidInputError: `stored` is not int8 or `scale` does not have one entry per row.
    """
    if stored.dtype != torch.int8:
        raise InvalidInputError.for_argument("stored.dtype", stored.dtype, "torch.int8")
    if scale.shape != stored.shape[:-1]:
        raise InvalidInputError.for_argument(
            "scale.shape", tuple(scale.shape), f"{tuple(stored.shape[:-1])}, one per row of stored"
        )
    wide = torch.promote_types(dtype, torch.float32)
    return (stored.to(wide) * scale.to(wide).unsqueeze(-1)).to(dtype)


def _check_fp8(dtype: torch.dtype) -> None:
    if dtype not in FP8_DTYPES:
        allowed = ", ".join(str(fp8) for fp8 in FP8_DTYPES)
        raise InvalidInputError.for_argument("dtype", dtype, allowed)


def _per_head_scale(x: Tensor, scale: float | Tensor) -> float | Tensor:
    """Return `scale` in a shape that broadcasts over (..., H, D)."""
    if not isinstance(scale, Tensor):
        if not (isinstance(scale, Real) and FLOAT32_LEAST <= scale <= FLOAT32_MOST):
            allowed = "a positive finite number of float32"
            raise InvalidInputError.for_argument("scale", scale, allowed)
        return float(scale)
    if scale.numel() == 1:
        return scale.to(x.device).reshape(())
    if x.dim() < 2 or scale.shape != x.shape[-2:-1]:
        raise InvalidInputError.for_argument(
            "scale.shape", tuple(scale.shape), f"one element, or (H,) for x {tuple(x.shape)}"
        )
    return scale.to(x.device).unsqueeze(-1)
