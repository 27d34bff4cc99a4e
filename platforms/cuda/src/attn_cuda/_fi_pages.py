"""Block tables as FlashInfer reads them: the pages of all requests in one row, and their bounds.

Counts come from the host's exact lengths, page numbers from the device's table; nothing here waits
for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from attn_shared.errors import MetadataError

__all__ = ["ListPages", "Pages", "page_indices", "pages_of", "require_pages"]

ListPages = Callable[[Tensor, Tensor, int], Tensor]
"""As `attn_shared.page_lists.page_indices`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pages:
    """How many pages each request has, on the host.

    Attributes:
        starts: (B + 1,) int32, prefix sums of the numbers of pages.
        last_lens: (B,) int32, tokens in the last page; 0 for a request without keys.
        seq_lens: (B,) int32.
        count: pages of all requests.
    """

    starts: Tensor
    last_lens: Tensor
    seq_lens: Tensor
    count: int


def pages_of(seq_lens: Tensor, block_size: int) -> Pages:
    """Return the pages of requests.

    Args:
        seq_lens: (B,) int32 on the host, exact.
        block_size: tokens per page.
    """
    starts = torch.zeros(len(seq_lens) + 1, dtype=torch.int32)
    counts = starts[1:]
    one, size = _number(1), _number(block_size)
    torch.add(seq_lens, _number(block_size - 1), out=counts)
    counts.floor_divide_(size).cumsum_(0)
    if block_size == 1:
        last_lens = seq_lens.clamp(max=1)
    else:  # the remainder has the sign of what is divided: 0 keys give -1 + 1
        last_lens = torch.sub(seq_lens, one).fmod_(size).add_(one)
    return Pages(starts=starts, last_lens=last_lens, seq_lens=seq_lens, count=int(starts[-1]))


@cache
def _number(value: int) -> Tensor:
    """Return a number as a tensor: to make one costs torch more than to add it."""
    with torch.inference_mode(mode=False):
        return torch.tensor(value, dtype=torch.int32)


def require_pages(seq_lens: Tensor, block_table: Tensor, block_size: int) -> None:
    """Refuse lengths that need more pages than the table has.

    Args:
        seq_lens: (B,) int32 on the host.
        block_table: (B, M).
        block_size: tokens per page.

    Raises:
        MetadataError: names the longest request and what the table holds.
    """
    held = block_table.shape[1] * block_size
    if len(seq_lens) and (longest := int(seq_lens.max())) > held:
        raise MetadataError.for_argument(
            f"seq_lens of request {int(seq_lens.argmax())}",
            longest,
            f"at most {held}, in {block_table.shape[1]} columns of {block_size} tokens",
        )


def page_indices(block_table: Tensor, pages: Pages, many: ListPages) -> Tensor:
    """Return the page numbers of all requests in a row, (pages.count,) int32 on the device.

    Args:
        block_table: (B, M) int32; entries past a request's pages are not read.
        pages: of its B requests.
        many: lists the pages of several requests; those of one lie in a row already.
    """
    if len(block_table) == 1 and block_table.stride(1) == 1:
        return block_table[0, : pages.count]
    return many(block_table, pages.starts, pages.count)
