"""Block tables as kernels over lists of pages read them: the pages of all requests in one row."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["page_indices"]


def page_indices(block_table: Tensor, starts: Tensor, count: int) -> Tensor:
    """Return the page numbers of all requests in a row, (count,) int32 on the table's device.

    It waits for nothing.

    Args:
        block_table: (B, M) int32; entries past a request's pages are not read.
        starts: (B + 1,) int32 on the host: prefix sums of the numbers of pages.
        count: pages of all requests, the last of `starts`.
    """
    device = block_table.device
    starts = starts.to(device, non_blocking=True)
    places = torch.arange(count, dtype=torch.int32, device=device)
    rows = torch.searchsorted(starts[1:], places, right=True)
    return block_table[rows, places - starts[rows]]
