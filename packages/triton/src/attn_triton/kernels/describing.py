"""Tensor descriptors made on the host: what rows a kernel reads, and in which tiles."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

__all__ = ["Place", "descriptor"]


class Place(NamedTuple):
    """Memory by its address, which unlike a tensor keeps nothing alive.

    Attributes:
        address: of the first element.
        dtype: of the elements.
    """

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        """Return the address, as a tensor does."""
        return self.address


def descriptor(
    base: Tensor | Place, shape: tuple[int, int], stride: int, tile: tuple[int, int]
) -> TensorDescriptor:
    """Describe rows of a matrix, to be read in tiles; what lies outside is read as zeros.

    Args:
        base: its first element, 16-byte aligned.
        shape: rows and columns.
        stride: elements from one row to the next, a multiple of 16 bytes.
        tile: rows and columns that are read at once.
    """
    return TensorDescriptor(base, list(shape), [stride, 1], list(tile))
