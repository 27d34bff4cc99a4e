"""Lists of pages by one Triton launch, where torch takes four.

Means what `attn_shared.page_lists.page_indices` means.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from attn_shared.alignment import dense_rows
from attn_triton.launch import AlignedLaunch, Launcher

__all__ = ["page_indices"]


def page_indices(block_table: Tensor, starts: Tensor, count: int) -> Tensor:
    """Return the page numbers of all requests in a row, (count,) int32 on the table's device.

    Args:
        block_table: (B, M) int32; entries past a request's pages are not read.
        starts: (B + 1,) int32 on the host: prefix sums of the numbers of pages.
        count: pages of all requests, the last of `starts`.
    """
    from attn_triton.kernels.page_lists import PAGES

    num_reqs, columns = block_table.shape
    table = dense_rows(block_table)
    indices = table.new_empty(count)
    there = starts.to(table.device, non_blocking=True)
    grid = (num_reqs, -(-columns // PAGES), 1) if count else (0, 0, 0)
    _launch(table.device)(grid, (indices, table, there), (table.stride(0),))
    return indices


@functools.cache
def _launch(device: torch.device) -> AlignedLaunch:
    from attn_triton.kernels.page_lists import PAGES, list_pages

    del device  # each has a launch of its own, which finds its machine code once
    return AlignedLaunch(Launcher(list_pages, {"COLUMNS": PAGES}))
