"""Heads side by side as rows of a matrix, which tensor descriptors describe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from attn_triton._keys import Strides

__all__ = ["Matrix", "cache_matrix", "token_matrix"]

_ALIGNMENT = 16  # bytes, of addresses and strides
_MOST_ROWS = 2**31


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """A matrix that holds all heads of a tensor.

    Attributes:
        rows, columns: of it.
        stride: elements from one row to the next.
        head_rows, head_columns: from one head to the next.
        block_rows: from one block of a cache to the next.
    """

    rows: int
    columns: int
    stride: int
    head_rows: int
    head_columns: int
    block_rows: int = 0


def token_matrix(tensor: Tensor, tokens: int) -> Matrix | None:
    """Return (tokens or more, heads, width) with heads side by side; None where that is not so.

    Rows past `tokens`, which may hold anything, are outside the matrix.

    That is: its address or its stride is not aligned, its last dimension is not dense, or its
    heads are not within a token's row.
    """
    _, heads, width = tensor.shape
    stride, head, last = tensor.stride()
    columns = (heads - 1) * head + width
    size = tensor.element_size()
    is_aligned = not (tensor.data_ptr() % _ALIGNMENT or stride * size % _ALIGNMENT)
    if last != 1 or not is_aligned or tokens == 0 or head < 0 or columns > stride:
        return None
    return Matrix(rows=tokens, columns=columns, stride=stride, head_rows=0, head_columns=head)


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
    if not is_aligned or min(blocks, token) < 1 or block % token or head < 0:
        return None
    columns = (heads - 1) * head + width
    head_rows, head_columns = 0, head
    if columns > token:
        if head % token:
            return None
        columns, head_rows, head_columns = width, head // token, 0
    rows = (blocks - 1) * (block // token) + (heads - 1) * head_rows + page
    if width > token or rows >= _MOST_ROWS:
        return None
    return Matrix(
        rows=rows,
        columns=columns,
        stride=token,
        head_rows=head_rows,
        head_columns=head_columns,
        block_rows=block // token,
    )
