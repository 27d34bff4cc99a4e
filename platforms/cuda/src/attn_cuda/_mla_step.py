"""What the decodes of one step are to a kernel over latents, and pages of the size it takes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attn_shared.errors import UnsupportedOptionError

__all__ = ["LatentStep", "in_pages", "kernel_table", "with_safe_rows"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LatentStep:
    """Decodes of a step, as the layers of a group hand them to a kernel.

    Attributes:
        query_start_loc: (B + 1,) int32.
        query_len: query tokens of each request, or 0 where they differ.
        max_query_len: host bound.
        seq_lens: (B,) int32.
        max_seq_len: host bound.
        block_table: (B, M) int32, of the kernel's pages.
        num_tokens: T, query tokens of these requests.
    """

    query_start_loc: Tensor
    query_len: int
    max_query_len: int
    seq_lens: Tensor
    max_seq_len: int
    block_table: Tensor
    num_tokens: int

    @property
    def num_reqs(self) -> int:
        """B."""
        return self.seq_lens.shape[0]


def in_pages(kv_cache: Tensor, page_size: int) -> Tensor:
    """Return a cache (blocks, block_size, width) as pages (pages, page_size, width), uncopied.

    Args:
        kv_cache: of blocks that are a multiple of the kernel's page.
        page_size: tokens of a page.

    Raises:
        UnsupportedOptionError: blocks that are cut and lie apart.
    """
    blocks, block_size, width = kv_cache.shape
    if block_size == page_size:
        return kv_cache
    if not kv_cache.is_contiguous():
        raise UnsupportedOptionError(
            f"blocks of {block_size} tokens with a stride of {kv_cache.stride(0)} elements cannot "
            f"be cut into the kernel's pages of {page_size}; allowed: a stride of "
            f"{block_size * width}.",
            hint=f"take blocks of {page_size} tokens, or no page_size_padded.",
        )
    return kv_cache.view(blocks * (block_size // page_size), page_size, width)


def kernel_table(block_table: Tensor, ratio: int, *, width_multiple: int = 1) -> Tensor:
    """Return a table (B, M) of blocks as one of the kernel's pages, `ratio` of them to a block.

    Args:
        block_table: (B, M) int32.
        ratio: pages in a block.
        width_multiple: what the number of columns has to be a multiple of; the rest is page 0.
    """
    table = block_table
    if ratio > 1:
        inside = torch.arange(ratio, dtype=table.dtype, device=table.device)
        table = (table.unsqueeze(-1) * ratio + inside).flatten(1)
    missing = -table.shape[1] % width_multiple
    return torch.nn.functional.pad(table, (0, missing)) if missing else table


def with_safe_rows(block_table: Tensor, seq_lens: Tensor, out: Tensor | None = None) -> Tensor:
    """Return a table whose rows without keys name a page that the longest request has.

    A kernel that loads a page whatever the length finds a valid one there, of finite content, and
    masks all of it. Nothing waits for the device. It is made anew for each step, so that it is few
    operations: on a GPU each costs the host more than the work.

    Args:
        block_table: (B, M) int32; rows of requests without keys may hold anything.
        seq_lens: (B,) int32.
        out: (B, M) int32 to write and return; None: a new one.
    """
    # A tensor of no dimension as an index would be read by the host.
    longest, donor = seq_lens.max(0, keepdim=True)
    page = block_table[:, :1].index_select(0, donor) * (longest > 0)
    keyless = (seq_lens < 1).unsqueeze(1)
    return torch.where(keyless, page, block_table, out=out)
