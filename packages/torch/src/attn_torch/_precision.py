"""Whether torch's float32 products are IEEE on a device, whatever API said otherwise."""

from __future__ import annotations

import torch

__all__ = ["accumulator_dtype", "fuses_ieee_float32", "has_ieee_float32"]

_IEEE = ("ieee", "none")


def has_ieee_float32(device: torch.device) -> bool:
    """Whether products of float32 matrices on `device` keep float32 operands.

    torch's precision switches (`torch.set_float32_matmul_precision`, `allow_tf32`,
    `fp32_precision`) belong to the process and are read here, never written: a library that
    flips them changes its host's own products.
    """
    backends = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    precision = getattr(getattr(backends, "matmul", None), "fp32_precision", None)
    if precision is None:  # before torch 2.9
        return torch.get_float32_matmul_precision() == "highest"
    return precision in _IEEE


def accumulator_dtype(device: torch.device) -> torch.dtype:
    """Return the narrowest dtype whose products are at least float32: float64 where that is not."""
    return torch.float32 if has_ieee_float32(device) else torch.float64


def fuses_ieee_float32(device: torch.device) -> bool:
    """Whether the fused attention kernels of `device` multiply float32 as float32.

    CUDA's build each product of three TF32 ones (CUTLASS's OpMultiplyAddFastF32), whatever the
    process's switches say; on an H200 that was seen to err beyond the contract's budget.
    """
    return device.type == "cpu"
