"""Addresses and strides at which vendors' kernels load and store 16 bytes at once."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["ALIGNMENT_BYTES", "aligned", "dense_rows", "is_aligned"]

ALIGNMENT_BYTES = 16
"""What kernels load and store at once."""


def is_aligned(rows: Tensor) -> bool:
    """Whether kernels can load and store rows (T, H, D), 16 bytes at a time."""
    if rows.is_contiguous():  # heads are multiples of 16 bytes
        return not rows.data_ptr() % ALIGNMENT_BYTES
    outer, inner, last = rows.stride()
    step = rows.element_size()
    return last == 1 and not (rows.data_ptr() | outer * step | inner * step) % ALIGNMENT_BYTES


def aligned(rows: Tensor) -> Tensor:
    """Return rows (T, H, D) that kernels can load; a copy only where need be."""
    return rows if is_aligned(rows) else rows.clone(memory_format=torch.contiguous_format)


def dense_rows(table: Tensor) -> Tensor:
    """Return a table (B, M) with neighbouring columns beside each other; a copy where need be."""
    return table if table.stride(1) == 1 or table.shape[1] <= 1 else table.contiguous()
