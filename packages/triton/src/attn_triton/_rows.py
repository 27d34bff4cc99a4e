"""Heads side by side as rows of a matrix, which tensor descriptors describe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from attn_triton._keys import Strides

__all__ = ["Matrix", "cache_matrix", "dense_matrix", "token_matrix"]

_ALIGNMENT = 16  # bytes, of addresses and strides
_MOST_ROWS = 2**31


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """A matrix that holds all heads of a tensor.

    Attributes:
        columns: of it.
        stride: elements from one row to the next.
        head_rows, head_columns: from one head to the next.
        block_rows: from one block of a cache to the next.
        rows: of one block of a cache; 0: as many as there are tokens.
    """

    columns: int
    stride: int
    head_rows: int = 0
    head_columns: int
    block_rows: int = 0
    rows: int = 0


def token_matrix(tensor: Tensor) -> Matrix | None:
    """Return (tokens, heads, width) with heads side by side; None where no descriptor may be.

    That is: its address or its stride is not aligned, its last dimension is not dense, or its
    heads are not within a token's row.
    """
    _, heads, width = tensor.shape
    stride, head, last = tensor.stride()
    columns = (heads - 1) * head + width
    is_aligned = not (tensor.data_ptr() % _ALIGNMENT or stride * tensor.element_size() % _ALIGNMENT)
    if last != 1 or not is_aligned or head < 0 or columns > stride:
        return None
    return Matrix(columns=columns, stride=stride, head_columns=head)


def dense_matrix(heads: int, width: int) -> Matrix:
    """Return (tokens, heads, width) without gaps."""
    return Matrix(columns=heads * width, stride=heads * width, head_columns=width)


def cache_matrix(
    address: int, strides: Strides, shape: Sequence[int], element_size: int
) -> Matrix | None:
    """Return keys or values of a cache by tokens, heads within a token or apart (NHD or HND).

    Args:
        address: of the first element.
        strides: of a block, a token, a head, in elements.
        shape: blocks, tokens of a block, heads, width.
        element_size: bytes.
    """
    blocks, page, heads, width = shape
    block, token, head = strides
    is_aligned = not (address % _ALIGNMENT or token * element_size % _ALIGNMENT)
    if not is_aligned or token < width or block % token or head < 0:
        return None
    columns, head_rows, head_columns = (heads - 1) * head + width, 0, head
    if columns > token:
        if head % token:
            return None
        columns, head_rows, head_columns = width, head // token, 0
    rows = (heads - 1) * head_rows + page
    if (blocks - 1) * (block // token) + rows >= _MOST_ROWS:
        return None
    return Matrix(
        columns=columns,
        stride=token,
        head_rows=head_rows,
        head_columns=head_columns,
        block_rows=block // token,
        rows=rows,
    )
