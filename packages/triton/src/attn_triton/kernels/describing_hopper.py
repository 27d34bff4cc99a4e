"""Tensor descriptors for kernels in Gluon, which have the layout of their tiles with them.

Where Triton has no such language the module does not import.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from attn_triton.kernels.describing import RowsAt

__all__ = ["described_for_hopper"]


class _HopperRows(RowsAt):
    """Rows by address, with the layout of their tiles in shared memory."""

    __slots__ = ("layout",)

    def __init__(self, rows: RowsAt) -> None:
        super().__init__(rows.data_ptr(), rows.dtype, rows.shape, rows.strides[0], rows.block_shape)
        self.layout = _layout(rows.block_shape, rows.dtype)


@functools.cache
def _layout(tile: tuple[int, int], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """Return the layout of a tile in shared memory."""
    element = gl.bfloat16 if dtype is torch.bfloat16 else gl.float16
    return gl.NVMMASharedLayout.get_default_for(list(tile), element)


def described_for_hopper(
    base: Tensor, address: int, shape: list[int], stride: int, tile: tuple[int, int]
) -> RowsAt:
    """Describe rows of a matrix as `describing.described` does, on a GPU."""
    return _HopperRows(RowsAt(address, base.dtype, shape, stride, tile))
