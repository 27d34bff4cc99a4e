"""What the layers of a step share when they call AITER."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attn_rocm._aiter_build import AiterBuild
from attn_shared.keyless import Keyless

__all__ = ["AiterFlashMetadata", "DecodeStep", "KeyPlaces", "PromptStep", "places_of"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecodeStep:
    """The leading requests of one query token each.

    Attributes:
        key_lens: (n,) int32, each at least 1: the wheel 0.1.7 merges no parts where there are none.
        block_table: (n, M) int32, its rows one after the other.
        max_key_len: host bound.
        workspace: (bytes,) uint8, as large as the kernel's partial results.
    """

    key_lens: Tensor
    block_table: Tensor
    max_key_len: int
    workspace: Tensor

    @property
    def num_reqs(self) -> int:
        """How many, and their query rows."""
        return len(self.key_lens)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeyPlaces:
    """Where each key of a batch lies in the cache, request by request.

    Attributes:
        starts: (B + 1,) int32: where the keys of each request begin.
        blocks: (N,) int64; entries past starts[-1] are 0.
        offsets: (N,) int64, inside the block.
    """

    starts: Tensor
    blocks: Tensor
    offsets: Tensor

    def page_indices(self, tokens_per_block: int) -> Tensor:
        """Return the places as numbers of tokens, (N,) int32, of blocks so many tokens apart."""
        return (self.blocks * tokens_per_block + self.offsets).to(torch.int32)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptStep:
    """Requests of any query lengths.

    Attributes:
        query_start_loc: (B + 1,) int32, from 0.
        max_query_len: host bound, at least 2: told 1, `flash_attn_varlen_func` has given wrong
            numbers (ROCm/aiter#2229), and both kernels drop the causal mask.
        max_key_len: host bound, at least 2, so that a window over all keys has a positive side.
        causal: bottom-right aligned.
        num_keys: bound of all keys together.
        key_lens: (B,) int32, of keys in the cache.
        key_start_loc: (B + 1,) int32, of keys that come with the call.
        block_table: (B, M) int32, dense in its rows; None without a cache.
        first_row: of the call's rows, the one that the first request begins with.
        brings_keys: the call's keys are all that there are, row for row those of the queries.
        keyless: the requests without keys, whose rows are to be set; None where there are none.
    """

    query_start_loc: Tensor
    max_query_len: int
    max_key_len: int
    causal: bool
    num_keys: int
    key_lens: Tensor | None = None
    key_start_loc: Tensor | None = None
    block_table: Tensor | None = None
    first_row: int = 0
    brings_keys: bool = False
    keyless: Keyless | None = None

    def after(self, num_reqs: int, num_keys: int) -> PromptStep:
        """Return the step without its first requests, each of which has one row.

        Args:
            num_reqs: how many of them.
            num_keys: bound of the other requests' keys together.
        """
        if not num_reqs:
            return replace(self, num_keys=num_keys)
        lens, table = self.key_lens, self.block_table
        return replace(
            self,
            query_start_loc=self.query_start_loc[num_reqs:] - num_reqs,
            first_row=num_reqs,
            num_keys=num_keys,
            key_lens=None if lens is None else lens[num_reqs:],
            block_table=None if table is None else table[num_reqs:],
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AiterFlashMetadata:
    """One step of ROCM_AITER_FA.

    Attributes:
        build: the release that it was made for.
        num_actual_tokens: query rows that belong to requests.
        num_keys: keys that a call without a cache brings; 0 with a cache.
        query_start_loc: (B + 1,) int32.
        whole: all requests.
        decode: the leading single queries; None where there are none, or no layer runs them apart.
        rest: the requests after those; None where they have no rows.
    """

    build: AiterBuild
    num_actual_tokens: int
    num_keys: int
    query_start_loc: Tensor
    whole: PromptStep
    decode: DecodeStep | None = None
    rest: PromptStep | None = None


def places_of(step: PromptStep, block_size: int) -> KeyPlaces:
    """Return where the keys of a step lie; nothing waits for the device.

    Args:
        step: with a cache.
        block_size: tokens per block.

    Raises:
        TypeError: it has none.
    """
    lens, table = step.key_lens, step.block_table
    if lens is None or table is None:
        raise TypeError("the step has no cache")
    starts = torch.zeros(len(lens) + 1, dtype=torch.int32, device=lens.device)
    torch.cumsum(lens, 0, dtype=torch.int32, out=starts[1:])
    keys = torch.arange(step.num_keys, dtype=torch.int32, device=lens.device)
    owners = torch.searchsorted(starts[1:], keys, right=True).clamp_(max=len(lens) - 1)
    is_real = keys < starts[-1]
    positions = torch.where(is_real, keys - starts[owners], 0).long()
    blocks = table[owners, positions // block_size]
    return KeyPlaces(
        starts=starts,
        blocks=torch.where(is_real, blocks, 0).long(),
        offsets=positions % block_size,
    )
