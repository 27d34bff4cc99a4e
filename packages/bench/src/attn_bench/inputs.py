"""Tensors of a workload: random data, shuffled blocks, and several copies where a cache could help."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attn_bench.workloads import Workload
from attn_shared.kv_cache import AttentionSpec
from attn_shared.metadata import CommonAttentionMetadata

__all__ = ["StepTensors", "block_table_of", "make_step"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepTensors:
    """One copy of a step's inputs.

    Attributes:
        query: (T, Hq, D).
        kv_cache: a filled cache.
        output: (T, Hq, D).
        common: the batch.
    """

    query: torch.Tensor
    kv_cache: torch.Tensor
    output: torch.Tensor
    common: CommonAttentionMetadata


def block_table_of(workload: Workload, block_size: int, seed: int) -> tuple[torch.Tensor, int]:
    """Return a table of shuffled blocks (B, M) int32 and how many blocks there are.

    Requests share the blocks of the shared prefix; every other block belongs to one request.
    """
    prefix = workload.shared_prefix_len // block_size
    needed = [-(-length // block_size) - prefix for length in workload.seq_lens]
    num_blocks = prefix + sum(needed)
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed)).int()
    table = torch.zeros(workload.batch, prefix + max(needed), dtype=torch.int32)
    table[:, :prefix] = order[:prefix]
    start = prefix
    for request, count in enumerate(needed):
        table[request, prefix : prefix + count] = order[start : start + count]
        start += count
    return table, num_blocks


def make_step(
    workload: Workload, spec: AttentionSpec, device: torch.device, seed: int
) -> StepTensors:
    """Return random inputs; zeros would run faster than real data on some devices."""
    table, num_blocks = block_table_of(workload, spec.block_size, seed)
    generator = torch.Generator(device).manual_seed(seed)
    heads = workload.heads
    shape = (workload.num_tokens, heads.num_heads, heads.head_size)
    query = torch.randn(shape, generator=generator, device=device).to(workload.dtype)
    kv_cache = spec.allocate(num_blocks, device)
    _fill(kv_cache, generator)
    return StepTensors(
        query=query,
        kv_cache=kv_cache,
        output=torch.empty_like(query),
        common=CommonAttentionMetadata.from_lengths(
            query_lens=workload.query_lens,
            seq_lens=workload.seq_lens,
            block_table=table,
            block_size=spec.block_size,
            device=device,
        ),
    )


def _fill(kv_cache: torch.Tensor, generator: torch.Generator) -> None:
    """Fill block by block: a float32 copy of a whole cache may not fit."""
    step = max(1, 2**26 // max(1, kv_cache[0].numel()))
    for start in range(0, kv_cache.shape[0], step):
        part = kv_cache[start : start + step]
        values = torch.randn(part.shape, generator=generator, device=kv_cache.device)
        part.copy_(values.mul_(16) if part.dtype is torch.int8 else values)
