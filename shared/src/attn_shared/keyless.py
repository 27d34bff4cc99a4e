"""Requests without keys, which some vendors' kernels must not meet as they are.

Padding of a captured batch has no keys, and the contract gives its rows 0 and -inf. A kernel that
leaves such rows unwritten, or divides by their length, is handed keys of block 0 for them, and the
rows are set afterwards; nothing here waits for the device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_shared.step_buffers import Buffers

__all__ = ["Keyless", "keyless_of"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Keyless:
    """Which requests of a step have no keys, and where their rows are.

    Attributes:
        requests: (B,) bool.
        rows: (T,) bool.
        num_columns: that a block table has at least.
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


def keyless_of(
    query_start_loc: Tensor,
    key_lens: Tensor,
    *,
    num_tokens: int,
    num_columns: int,
    buffers: Buffers,
) -> Keyless:
    """Find the requests without keys of a step.

    Args:
        query_start_loc: (B + 1,) int32, B > 0.
        key_lens: (B,) int32.
        num_tokens: T.
        num_columns: as in `Keyless`.
        buffers: of the tensors that are made.
    """
    tokens = torch.arange(num_tokens, dtype=torch.int32, device=key_lens.device)
    owners = torch.searchsorted(query_start_loc[1:], tokens, right=True)
    requests = buffers.kept("keyless requests", key_lens < 1)
    return Keyless(
        requests=requests,
        rows=buffers.kept("keyless rows", requests[owners.clamp_(max=len(key_lens) - 1)]),
        num_columns=num_columns,
        buffers=buffers,
    )
