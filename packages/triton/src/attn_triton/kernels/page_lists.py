"""Write the pages of all requests in one row."""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl

from attn_triton.variants import KernelVariant

__all__ = ["PAGES", "list_pages", "variants"]

PAGES = 1024
"""Columns of the table that one program reads at most."""


@triton.jit
def list_pages(indices, block_table, starts, stride: tl.int64, COLUMNS: tl.constexpr):
    """Copy COLUMNS entries of a request's row of the table, those that are pages of it."""
    request = tl.program_id(0)
    first = tl.load(starts + request)
    count = tl.load(starts + request + 1) - first
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row = block_table + request.to(tl.int64) * stride
    pages = tl.load(row + columns, mask=columns < count)
    tl.store(indices + first + columns, pages, mask=columns < count)


def variants(arch: str) -> Iterator[KernelVariant]:
    """Yield how pages are listed, on every architecture alike."""
    del arch
    yield KernelVariant(
        name="page-lists",
        kernel=list_pages,
        signature={
            "indices": "*i32",
            "block_table": "*i32",
            "starts": "*i32",
            "stride": "i64",
        },
        constants={"COLUMNS": PAGES},
    )
