"""How one step's long prompts are launched: sizes of grids, and what the host knows of lengths."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.request import AttentionType
from attn_triton._steps import query_lens
from attn_triton._visibility import CACHE_FREE
from attn_triton.prompt_tiles import PromptKernel, PromptTile

__all__ = [
    "COPIED_TOKENS",
    "CopyRoom",
    "PromptGrid",
    "PromptKind",
    "Prompts",
    "blocks_size",
    "kind_of",
    "prompts_of",
]

COPIED_TOKENS = 64
"""Tokens that one program copies out of pages."""

_LONG_KEYS = 16384
"""Keys of a request from which the kernel for Hopper has a program for each item: 651 instead of
635 TFLOP/s at 1x16384 on an H200. One that takes many begins an item while it ends another, which
is worth 8 % at 1x4096."""

_HEADER = 4  # as kernels.blocks.HEADER, which only a process with Triton may import


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """What the host knows of the requests that do not decode, exactly or as a bound.

    Attributes:
        num_blocks: blocks of query tokens, at most.
        longest: keys of one of them, at most.
        has_context: one of them may have keys of earlier steps.
        num_keys: keys of all of them, at most; None: not known.
    """

    num_blocks: int
    longest: int
    has_context: bool
    num_keys: int | None


class CopyRoom:
    """Rows that keys and values of small pages are copied to; grows, and layers share it."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None

    def rows(
        self, like: Tensor, num_rows: int, num_heads: int, widths: tuple[int, int]
    ) -> tuple[Tensor, Tensor]:
        """Return room for keys and values, (num_rows, Hkv, D) and (num_rows, Hkv, Dv).

        Args:
            like: of their dtype, where they should be.
            num_rows: of each.
            num_heads: Hkv.
            widths: D and Dv.
        """
        sizes = [num_rows * num_heads * width for width in widths]
        memory = self._memory
        if memory is None or memory.dtype is not like.dtype or len(memory) < sum(sizes):
            memory = self._memory = torch.empty(sum(sizes), dtype=like.dtype, device=like.device)
        keys, values = memory[: sizes[0]], memory[sizes[0] : sum(sizes)]
        shape = (num_rows, num_heads)
        return keys.view(*shape, widths[0]), values.view(*shape, widths[1])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptKind:
    """What a layer's way of running a step's long prompts depends on; made by `kind_of`.

    Equal ones are made once, so that looking up what was made for one hashes its identity.

    Attributes:
        tile: of one program.
        has_context: a request may have keys of earlier steps.
        may_copy: keys may be copied out of pages: their number is known, and there is room.
        is_invariant: results must not depend on what shares the batch.
        allows_fresh: fresh keys may stand for those of a quantised cache.
    """

    tile: PromptTile
    has_context: bool
    may_copy: bool
    is_invariant: bool
    allows_fresh: bool


@functools.cache
def kind_of(
    tile: PromptTile,
    *,
    has_context: bool,
    may_copy: bool,
    is_invariant: bool,
    allows_fresh: bool,
) -> PromptKind:
    """Return the kind of these, always the same object."""
    return PromptKind(
        tile=tile,
        has_context=has_context,
        may_copy=may_copy,
        is_invariant=is_invariant,
        allows_fresh=allows_fresh,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptGrid:
    """How the kernel for long prompts runs in a step.

    Attributes:
        kind: what the way of running them depends on.
        blocks: the list of blocks, which the device fills.
        prompts: what the host knows.
        decode_tokens: query tokens up to which a request decodes.
        section_heads: query heads whose keys are walked together.
        room: for keys that are copied out of pages.
        compute_units: of the device.
    """

    kind: PromptKind
    blocks: Tensor
    prompts: Prompts
    decode_tokens: int
    section_heads: int
    room: CopyRoom
    compute_units: int

    def programs(self, num_heads: int) -> int:
        """Return how many run a layer of so many heads."""
        prompts = self.prompts
        items = prompts.num_blocks * num_heads
        if self.kind.tile.kernel is PromptKernel.PORTABLE:
            return items
        # A bound may be far above what there is, and a program takes long to find nothing to do.
        is_long = prompts.num_keys is not None and prompts.longest >= _LONG_KEYS
        return items if is_long else min(items, self.compute_units)


def prompts_of(
    common: CommonAttentionMetadata,
    *,
    rows: int,
    most_tokens: int,
    attn_type: AttentionType,
    is_bound: bool,
) -> Prompts:
    """Return what the host knows of the requests of more than `most_tokens` query tokens.

    Args:
        common: the batch.
        rows: query tokens of a block.
        most_tokens: query tokens up to which a request decodes.
        attn_type: whose keys the lengths count.
        is_bound: return bounds for every batch of as many requests and tokens.
    """
    count, tokens = common.num_reqs, common.num_actual_tokens
    is_cache_free, is_cross = attn_type in CACHE_FREE, attn_type is AttentionType.ENCODER_DECODER
    if is_bound:
        return Prompts(
            num_blocks=count + tokens // rows,
            longest=common.max_seq_len,
            has_context=not is_cache_free,
            num_keys=None,
        )
    lens = query_lens(common)
    is_long = [length > most_tokens for length in lens]
    known = common.encoder_seq_lens_cpu if is_cross else common.seq_lens_cpu
    keys = None if known is None or is_cache_free else _chosen(known.tolist(), is_long)
    queries = _chosen(lens, is_long)
    is_exact = not is_cross and common.seq_lens_cpu_is_exact
    return Prompts(
        num_blocks=sum(-(-length // rows) for length in queries),
        longest=common.max_seq_len if keys is None else max(keys, default=0),
        has_context=not is_cache_free and not (is_exact and keys == queries),
        num_keys=None if keys is None else sum(keys),
    )


def blocks_size(num_reqs: int, num_blocks: int) -> int:
    """Return the numbers that the list of blocks takes."""
    return _HEADER + num_reqs + 2 * num_blocks


def _chosen(numbers: Sequence[int], is_chosen: Sequence[bool]) -> list[int]:
    return [number for number, chosen in zip(numbers, is_chosen, strict=True) if chosen]
