"""The block table on the host: which blocks are read, and where each stands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_shared.errors import MetadataError
from attn_torch._spans import Span
from attn_torch._visibility import Visibility

__all__ = ["PagedTable"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PagedTable:
    """The block table on the host.

    Attributes:
        blocks: (B, M) int64; entries that nobody reads are 0.
        is_used: (B, M) bool: whether the entry holds keys of its request.
        block_size: tokens per block.
    """

    blocks: Tensor
    is_used: Tensor
    block_size: int

    @classmethod
    def read(
        cls, table: Tensor, spans: Sequence[Span], visibility: Visibility, block_size: int
    ) -> PagedTable:
        """Copy a table to the host, which waits for the device that holds it.

        Entries wholly left of what a request's first row sees are not used: an engine may have
        given their blocks away.

        Args:
            table: (B, M) int32; each row has room for its request's keys.
            spans: rows of requests that see at least one key.
            visibility: window and chunk of the layers.
            block_size: tokens per block.

        Raises:
            MetadataError: an entry that holds keys is negative.
        """
        num_reqs, width = table.shape
        first, stop = torch.zeros(num_reqs, 1), torch.zeros(num_reqs, 1)
        for span in spans:
            starts = [start for start, _ in span.ranges]
            leftmost = min(visibility.first_key(span.position), *starts, span.key_len)
            first[span.request] = leftmost // block_size
            stop[span.request] = -(-span.key_len // block_size)
        column = torch.arange(width)
        is_used = (column >= first) & (column < stop)
        blocks = torch.where(is_used, table.cpu().long(), 0)
        if bool((blocks < 0).any()):
            request, place = (blocks < 0).nonzero()[0].tolist()
            raise MetadataError.for_argument(
                f"block_table[{request}, {place}]", int(blocks[request, place]), "a block id >= 0"
            )
        return cls(blocks=blocks, is_used=is_used, block_size=block_size)

    @property
    def num_spanned(self) -> int:
        """The largest block id that is read, plus one."""
        return int(self.blocks.max()) + 1 if self.blocks.numel() else 0

    def columns_by_block(self) -> Tensor | None:
        """Return (num_spanned,) int64: the column at which each block stands, in every row.

        Requests that share a prefix name the same blocks at the same columns. None where a block
        stands at two columns: its keys then have two positions, and no function of the block
        alone can tell which is meant.
        """
        column = torch.arange(self.blocks.shape[1]).expand_as(self.blocks)[self.is_used]
        block = self.blocks[self.is_used]
        columns = torch.zeros(self.num_spanned, dtype=torch.int64)
        columns[block] = column
        return columns if torch.equal(columns[block], column) else None
