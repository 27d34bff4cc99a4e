"""Rows that see no key: which they are, so that they can be set after a kernel ran.

What kernels write for such a row is not said anywhere: one leaves it as it was, one gives it a key,
one divides zero by zero. Nothing here waits for the device.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attn_shared.request import Window

__all__ = ["blank", "keyless_rows", "with_one_key"]


def keyless_rows(
    query_start_loc: Tensor, key_lens: Tensor, num_tokens: int, *, causal: bool, window: Window
) -> Tensor:
    """Return which rows see no key: (T,) bool.

    Row r of a request sits at position key_len - query_len + r, and sees the keys from position -
    left to position + right (to itself with a causal mask) that there are.

    Args:
        query_start_loc: (B + 1,) int32.
        key_lens: (B,) int32.
        num_tokens: T.
        causal: whether the causal mask holds.
        window: (left, right), None for unbounded.
    """
    stops = query_start_loc[1:]
    tokens = torch.arange(num_tokens, dtype=torch.int32, device=key_lens.device)
    owners = torch.searchsorted(stops, tokens, right=True).clamp_(max=len(key_lens) - 1)
    lens = key_lens[owners]
    positions = lens - (stops[owners] - tokens)
    left, right = window
    first = torch.zeros_like(positions) if left is None else (positions - left).clamp_(min=0)
    last = lens - 1
    if causal or right is not None:
        reach = positions if causal else positions + right  # type: ignore[operator]
        last = torch.minimum(last, reach)
    return first > last


def with_one_key(key_lens: Tensor, block_table: Tensor) -> tuple[Tensor, Tensor]:
    """Return lengths and a table in which requests without keys have one, of block 0.

    A kernel that reads it reads what is there; the table's entries of such a request may be
    anything.
    """
    is_empty = key_lens < 1
    return key_lens.clamp(min=1), block_table.masked_fill(is_empty[:, None], 0)


def blank(rows: Tensor, output: Tensor, lse: Tensor | None) -> None:
    """Set such rows of an output (T, Hq, Dv) to 0 and of an LSE (Hq, T) to -inf, in place."""
    output.masked_fill_(rows[:, None, None], 0.0)
    if lse is not None:
        lse.masked_fill_(rows[None], -math.inf)
