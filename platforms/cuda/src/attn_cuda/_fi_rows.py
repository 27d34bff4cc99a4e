"""Requests of a batch as the host knows them, cut where other kernels begin."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Rows", "cut", "keyless_rows", "num_single_rows"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """Requests in a row, as the host knows them.

    Attributes:
        query_start_loc: (B + 1,) int32 on the host, from 0.
        seq_lens: (B,) int32 on the host.
        block_table: (B, M) int32 on the device.
        device_lens: (B,) int32 on the device, as `seq_lens`.
        first: the step's row where they begin.
        num_tokens: rows.
        max_query_len: of the longest.
        causal: bottom-right aligned.
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    device_lens: Tensor
    first: int
    num_tokens: int
    max_query_len: int
    causal: bool

    @property
    def last(self) -> int:
        """The step's row behind them."""
        return self.first + self.num_tokens


def num_single_rows(rows: Rows) -> int:
    """Return how many leading requests have one row each."""
    if rows.max_query_len == 1 and rows.num_tokens == len(rows.seq_lens):
        return rows.num_tokens
    if int(rows.query_start_loc[1]) != 1:
        return 0
    starts = rows.query_start_loc.tolist()
    others = (index for index, start in enumerate(starts) if start != index)
    return next(others, len(starts)) - 1


def cut(rows: Rows, start: int, stop: int | None) -> Rows:
    """Return the requests from `start` on, those from `stop` on left out."""
    if start == 0 and stop in (None, len(rows.seq_lens)):
        return rows
    starts = rows.query_start_loc[start : None if stop is None else stop + 1]
    first, last = int(starts[0]), int(starts[-1])
    lens = starts.diff()
    return Rows(
        query_start_loc=starts - first if first else starts,
        seq_lens=rows.seq_lens[start:stop],
        block_table=rows.block_table[start:stop],
        device_lens=rows.device_lens[start:stop],
        first=rows.first + first,
        num_tokens=last - first,
        max_query_len=int(lens.max()) if len(lens) else 0,
        causal=rows.causal,
    )


def keyless_rows(rows: Rows) -> Tensor | None:
    """Return (n,) int64 on the device: rows, from the part's first, that see no key."""
    needed = rows.max_query_len if rows.causal else 1
    if len(rows.seq_lens) and int(rows.seq_lens.min()) >= needed:
        return None
    query_lens = rows.query_start_loc.diff()
    if rows.causal:
        missing = (query_lens - rows.seq_lens).clamp_(min=0)
    else:
        missing = torch.where(rows.seq_lens == 0, query_lens, 0)
    if not bool(missing.any()):
        return None
    places = [
        torch.arange(start, start + count)
        for start, count in zip(rows.query_start_loc.tolist(), missing.tolist(), strict=False)
    ]
    return torch.cat(places).to(rows.block_table.device, non_blocking=True)
