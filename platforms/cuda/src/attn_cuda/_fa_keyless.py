"""Requests without keys, which FlashAttention 2 must not get as they are.

Its kernel for pages leaves early where a request has no key, and then writes the LSE as if the
tensor were (B, Hq, longest query), where it is (Hq, T): the request's own LSE stays unwritten, that
of others is overwritten, and what lies behind the tensor may be (issue 2842 of
Dao-AILab/flash-attention). It writes an LSE whether or not one is asked for. So such a request gets
keys of block 0, and its rows are set afterwards.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from attn_shared.keyless import keyless_of
from attn_shared.step_buffers import Buffers

if TYPE_CHECKING:
    from attn_cuda._fa_step import KeyStep

__all__ = ["with_keys"]


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
    most = step.max_query_len if step.causal else 1
    keyless = keyless_of(
        starts,
        lens,
        num_tokens=num_tokens,
        num_columns=-(-most // block_size),
        buffers=buffers,
    )
    needed = starts.diff().clamp_(min=1) if step.causal else torch.ones_like(lens)
    return replace(
        step,
        max_key_len=max(step.max_key_len, most),
        key_lens=buffers.kept("key_lens", torch.where(keyless.requests, needed, lens)),
        block_table=keyless.table(block_table),
        keyless=keyless,
    )
