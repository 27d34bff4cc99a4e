"""Tensor descriptors made on the host: what rows a kernel reads, and in which tiles."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

__all__ = ["RowsAt", "described"]


class RowsAt:
    """Rows of a matrix by address: a descriptor that keeps nothing alive and is quickly made.

    It has what Triton's launchers read of a `TensorDescriptor`, whose checks its maker has done,
    and stands for the tensor that is described as well, of which they ask address and dtype.
    """

    __slots__ = ("_address", "block_shape", "dtype", "shape", "strides")

    padding = "zero"
    round_f32_to_tf32 = False

    def __init__(
        self, address: int, dtype: torch.dtype, shape: list[int], stride: int, tile: tuple[int, int]
    ) -> None:
        self._address = address
        self.dtype = dtype
        self.shape = shape
        self.strides = [stride, 1]
        self.block_shape = tile

    @property
    def base(self) -> RowsAt:
        """What is described."""
        return self

    def data_ptr(self) -> int:
        """Return the address."""
        return self._address


def described(
    base: Tensor, address: int, shape: list[int], stride: int, tile: tuple[int, int]
) -> Any:
    """Describe rows of a matrix, to be read in tiles; what lies outside is read as zeros.

    Args:
        base: the tensor that holds it.
        address: of its first element, a multiple of 16.
        shape: rows and columns.
        stride: elements from one row to the next, a multiple of 16 bytes.
        tile: rows and columns that are read at once.
    """
    if base.device.type == "cpu":  # the interpreter wants the tensor
        return TensorDescriptor(base, shape, [stride, 1], list(tile))
    return RowsAt(address, base.dtype, shape, stride, tile)
