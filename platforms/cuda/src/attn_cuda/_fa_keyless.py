"""Requests without keys, which FlashAttention 2 must not get as they are.

Its kernel for pages leaves early where a request has no key, and then writes the LSE as if the
tensor were (B, Hq, longest query), where it is (Hq, T): the request's own LSE stays unwritten, that
of others is overwritten, and what lies behind the tensor may be (issue 2842 of
Dao-AILab/flash-attention). It writes an LSE whether or not one is asked for. So such a request gets
keys of block 0, and its rows are set afterwards.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attn_cuda._fa_buffers import Buffers

if TYPE_CHECKING:
    from attn_cuda._fa_step import KeyStep

__all__ = ["Keyless", "with_keys"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Keyless:
    """Which requests of a step have no keys, and where their rows are.

    Attributes:
        requests: (B,) bool.
        rows: (T,) bool.
        num_columns: that a block table has at least, so that every row sees a key.
        buffers: where tables are kept that a captured graph reads.
    """

    requests: Tensor
    rows: Tensor
    num_columns: int
    buffers: Buffers

    def table(self, block_table: Tensor) -> Tensor:
        """Return a table (B, M or more) with block 0 throughout where a request has no keys."""
        missing = max(0, self.num_columns - block_table.shape[1])
        table = torch.nn.functional.pad(block_table, (0, missing))
        table = table.masked_fill(self.requests[:, None], 0)
        kept = self.buffers.kept(f"table at {block_table.data_ptr()}", table.flatten())
        return kept.view(table.shape)

    def blank(self, output: Tensor, lse: Tensor | None) -> None:
        """Set the rows of an output (T, Hq, Dv) to 0 and those of an LSE (Hq, T) to -inf."""
        output.masked_fill_(self.rows[:, None, None], 0.0)
        if lse is not None:
            lse.masked_fill_(self.rows[None], -math.inf)


def with_keys(step: KeyStep, *, num_tokens: int, block_size: int, buffers: Buffers) -> KeyStep:
    """Return a step over pages in which every request has as many keys as let each row see one.

    Args:
        step: with lengths and a block table, and no starts of keys.
        num_tokens: T.
        block_size: tokens per page.
        buffers: of the tensors that are made; nothing here waits for the device.
    """
    starts, lens, block_table = step.query_start_loc, step.key_lens, step.block_table
    if lens is None or block_table is None or not len(lens):
        return step
    tokens = torch.arange(num_tokens, dtype=torch.int32, device=lens.device)
    owners = torch.searchsorted(starts[1:], tokens, right=True).clamp_(max=len(lens) - 1)
    requests = buffers.kept("keyless requests", lens < 1)
    most = step.max_query_len if step.causal else 1
    keyless = Keyless(
        requests=requests,
        rows=buffers.kept("keyless rows", requests[owners]),
        num_columns=-(-most // block_size),
        buffers=buffers,
    )
    needed = starts.diff().clamp_(min=1) if step.causal else torch.ones_like(lens)
    return replace(
        step,
        max_key_len=max(step.max_key_len, most),
        key_lens=buffers.kept("key_lens", torch.where(requests, needed, lens)),
        block_table=keyless.table(block_table),
        keyless=keyless,
    )
