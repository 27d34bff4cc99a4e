"""Earlier keys of long prefills, cut into chunks of a bounded number of tokens.

A prefill over latents expands every key it reads to all heads, many times the cache's bytes. The
keys of earlier steps are therefore expanded a chunk at a time; results of chunks are merged by
their LSE (FlashAttention, arXiv 2205.14135), so that memory is bounded however long the sequences.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_shared.mla_metadata import ContextChunk, RaggedPart
from attn_shared.spec import LayerSpec

__all__ = [
    "ContextPieces",
    "context_chunks",
    "context_tokens",
    "cut_context",
    "prefix_sums",
    "ragged_part",
    "slots_of",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextPieces:
    """Keys [starts[i], starts[i] + lens[i]) of request first + i, for each i."""

    first: int
    starts: tuple[int, ...]
    lens: tuple[int, ...]

    @property
    def stop(self) -> int:
        """The request after the last."""
        return self.first + len(self.lens)


def context_tokens(spec: LayerSpec, workspace_bytes: int, block_size: int) -> int:
    """Return how many expanded keys fit in so many bytes: whole blocks, at least one.

    A key costs its latent and, for each head, its up-projections, the key with its rope part, and
    a value padded to the key's width.

    Args:
        spec: of an MLA layer.
        workspace_bytes: bytes to stay within.
        block_size: tokens per block.
    """
    dims = spec.mla
    if dims is None:
        return block_size
    key = dims.qk_nope_head_dim + dims.qk_rope_head_dim
    projected = dims.qk_nope_head_dim + dims.v_head_dim
    entries = dims.latent_size + spec.num_heads * (projected + 2 * key)
    tokens = workspace_bytes // (entries * spec.dtype.itemsize)
    return max(1, tokens // block_size) * block_size


def cut_context(
    context_lens: Sequence[int], max_tokens: int, *, is_invariant: bool = False
) -> list[ContextPieces]:
    """Cut the earlier keys of some requests into chunks of at most `max_tokens`.

    Requests side by side share a chunk; one without earlier keys ends it, so that no row of a
    chunk is without a key.

    Args:
        context_lens: earlier keys of each request.
        max_tokens: keys of a chunk, a multiple of the block size.
        is_invariant: chunks must not depend on what shares the batch: requests share none.
    """
    chunks: list[ContextPieces] = []
    open_starts: list[int] = []
    open_lens: list[int] = []

    def close(stop: int) -> None:
        if open_lens:
            first = stop - len(open_lens)
            chunk = ContextPieces(first=first, starts=(*open_starts,), lens=(*open_lens,))
            chunks.append(chunk)
            open_starts.clear()
            open_lens.clear()

    for request, length in enumerate(context_lens):
        if length == 0 or is_invariant:
            close(request)
        done = 0
        while done < length:
            room = max_tokens - sum(open_lens)
            if room == 0:
                close(request + (done > 0))
                room = max_tokens
            size = min(room, length - done)
            open_starts.append(done)
            open_lens.append(size)
            done += size
    close(len(context_lens))
    return chunks


def context_chunks(
    pieces: Sequence[ContextPieces],
    query_start_loc_cpu: Tensor,
    block_table: Tensor,
    block_size: int,
) -> Iterator[ContextChunk]:
    """Lay chunks out on the device of the block table, without waiting for it.

    Args:
        pieces: of the requests that the other arguments describe.
        query_start_loc_cpu: (B + 1,) int32.
        block_table: (B, M) int32.
        block_size: tokens per block.
    """
    device = block_table.device
    for chunk in pieces:
        starts = query_start_loc_cpu[chunk.first : chunk.stop + 1]
        rows = slice(int(starts[0]), int(starts[-1]))
        part = ragged_part(starts - starts[0], prefix_sums(chunk.lens), device, is_causal=False)
        table = block_table[chunk.first : chunk.stop]
        yield ContextChunk(
            rows=rows, part=part, slots=slots_of(chunk, part.key_start_loc_cpu, table, block_size)
        )


def prefix_sums(lens: Sequence[int]) -> Tensor:
    """Return (B + 1,) int32 on the host."""
    sums = torch.zeros(len(lens) + 1, dtype=torch.int32)
    sums[1:] = torch.tensor(lens, dtype=torch.int32).cumsum(0)
    return sums


def ragged_part(
    query_start_loc_cpu: Tensor,
    key_start_loc_cpu: Tensor,
    device: torch.device,
    *,
    is_causal: bool,
) -> RaggedPart:
    """Describe requests by their offsets, which are copied to the device.

    Args:
        query_start_loc_cpu: (B + 1,) int32 on the host.
        key_start_loc_cpu: (B + 1,) int32 on the host.
        device: where the kernels run.
        is_causal: as in `RaggedPart`.
    """
    return RaggedPart(
        query_start_loc=query_start_loc_cpu.to(device, non_blocking=True),
        query_start_loc_cpu=query_start_loc_cpu,
        key_start_loc=key_start_loc_cpu.to(device, non_blocking=True),
        key_start_loc_cpu=key_start_loc_cpu,
        max_query_len=_longest(query_start_loc_cpu),
        max_key_len=_longest(key_start_loc_cpu),
        is_causal=is_causal,
    )


def _longest(starts: Tensor) -> int:
    return int(starts.diff().max()) if len(starts) > 1 else 0


def slots_of(
    chunk: ContextPieces, key_start_loc_cpu: Tensor, table: Tensor, block_size: int
) -> Tensor:
    """Return (n,) int64: the slot of each key, request after request, where the table is.

    Args:
        chunk: which keys.
        key_start_loc_cpu: (R + 1,) int32, prefix sums of their numbers.
        table: (R, M) int32, of the chunk's requests.
        block_size: tokens per block.
    """
    device, num_keys = table.device, int(key_start_loc_cpu[-1])
    key_starts = key_start_loc_cpu.to(device, non_blocking=True)
    lens = key_starts.diff()
    requests = torch.arange(len(chunk.lens), device=device)
    request = torch.repeat_interleave(requests, lens, output_size=num_keys)
    first = torch.tensor(chunk.starts, dtype=torch.int64).to(device)
    shift = first - key_starts[:-1]
    position = torch.arange(num_keys, device=device) + shift[request]
    column = position.div(block_size, rounding_mode="floor")
    blocks = table[request, column].long()
    return blocks * block_size + position.remainder(block_size)
