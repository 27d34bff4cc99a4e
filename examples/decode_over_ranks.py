"""Decode one long sequence whose cache is sharded over the ranks of a process group.

    torchrun --nproc-per-node=2 examples/decode_over_ranks.py --context 32768
    torchrun --nproc-per-node=4 examples/decode_over_ranks.py --device cuda --dtype bfloat16

Each rank holds its own query heads, the same kv heads, and one token in `ranks` of every sequence
(in runs of --interleave). It fills its share of the cache, decodes some steps, and the first rank
prints a table: what a rank holds, what it sends per step, how long a step takes, and how far the
last answer is from the one that the first rank computes alone over the whole cache. Started without
torchrun it is one rank, the yardstick for the others: all heads of all ranks, on one device.

gloo carries the collectives on a CPU, NCCL on NVIDIA GPUs, one rank per GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from attn_shared.kv_cache import AttentionSpec
from attn_shared.kv_write import write_kv
from attn_shared.layer import Attention
from attn_shared.ranks import ContextParallel
from attn_shared.sharded_batch import blocks_per_rank, sharded_batch

__all__ = ["main"]

BLOCK_SIZE = 16
CHUNK = 8192  # tokens that are made and written at once

Row = dict[str, object]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one rank."""
    options = _parsed(arguments)
    place = _join(options)
    if options.heads % _num_ranks():
        raise SystemExit(f"--heads {options.heads} is no multiple of {_num_ranks()} ranks")
    row = _measure(options, place)
    if _rank() == 0:
        _show(row)
        if options.json:
            Path(options.json).write_text(json.dumps(row, indent=2) + "\n", encoding="utf-8")
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    return 0


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cpu", help="cpu, or cuda for one GPU per rank")
    parser.add_argument("--backend", default="auto", help="attention backend (auto: selected)")
    parser.add_argument("--context", type=int, default=32768, help="tokens of each sequence")
    parser.add_argument("--batch", type=int, default=1, help="sequences")
    parser.add_argument("--steps", type=int, default=20, help="decode steps that are timed")
    parser.add_argument("--heads", type=int, default=32, help="query heads of all ranks together")
    parser.add_argument("--kv-heads", type=int, default=1, help="kv heads, which every rank has")
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--dtype", default="float32", help="float32, bfloat16 or float16")
    parser.add_argument("--interleave", type=int, default=1, help="consecutive tokens of a rank")
    parser.add_argument("--combine", choices=("ag_rs", "a2a"), default=None)
    parser.add_argument("--no-check", action="store_true", help="compare with nothing")
    parser.add_argument("--json", help="file to write the row to")
    return parser.parse_args(arguments)


def _join(options: argparse.Namespace) -> ContextParallel:
    """Join the group that torchrun describes; without it this is one rank."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return ContextParallel()
    if options.device.startswith("cuda"):
        options.device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
        torch.cuda.set_device(options.device)
    dist.init_process_group("nccl" if options.device.startswith("cuda") else "gloo")
    return ContextParallel(
        dcp_group=dist.group.WORLD, interleave=options.interleave, combine=options.combine
    )


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _num_ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _layer(options: argparse.Namespace, place: ContextParallel, num_heads: int) -> Attention:
    return Attention(
        num_heads=num_heads,
        num_kv_heads=options.kv_heads,
        head_size=options.head_size,
        dtype=getattr(torch, options.dtype),
        device=options.device,
        backend=options.backend,
        block_size=BLOCK_SIZE,
        context_parallel=place,
    )


def _measure(options: argparse.Namespace, place: ContextParallel) -> Row:
    """Fill the cache, decode, compare."""
    ranks, rank = _num_ranks(), _rank()
    attn = _layer(options, place, options.heads // ranks)
    total = options.context + options.steps
    per_request = blocks_per_rank(total, BLOCK_SIZE, place)
    kv_cache = attn.allocate(options.batch * per_request)
    table = torch.arange(options.batch * per_request).view(options.batch, per_request)
    _fill(options, attn, place, kv_cache, table)
    seconds, query, output = [], None, None
    for step in range(options.steps + 1):  # the first one compiles and warms up
        tokens = options.context + max(step, 1)
        query, key, value = _new_tokens(options, tokens - 1)
        own = slice(rank * attn.spec.num_heads, (rank + 1) * attn.spec.num_heads)
        common = sharded_batch(
            query_lens=[1] * options.batch,
            seq_lens=[tokens] * options.batch,
            block_table=table,
            block_size=BLOCK_SIZE,
            place=place,
            device=options.device,
        )
        mine = query[:, own].contiguous()
        _wait(options)
        started = time.perf_counter()
        output = attn.forward(mine, key, value, kv_cache, attn.plan(common))
        _wait(options)
        seconds.append(time.perf_counter() - started)
    row = _row(options, attn, kv_cache, seconds[1:])
    if not options.no_check and query is not None and output is not None:
        row["largest difference from one rank alone"] = _difference(options, query, output)
    return row


def _fill(
    options: argparse.Namespace,
    attn: Attention,
    place: ContextParallel,
    kv_cache: Tensor,
    table: Tensor,
) -> None:
    """Write this rank's share of the context, some tokens at a time."""
    if not isinstance(attn.kv_cache_spec, AttentionSpec):
        raise TypeError("a decoder layer has a cache")
    for first, stop in _chunks(options.context):
        length = stop - first
        common = sharded_batch(
            query_lens=[length] * options.batch,
            seq_lens=[stop] * options.batch,
            block_table=table,
            block_size=BLOCK_SIZE,
            place=place,
            device=options.device,
        )
        if common.slot_mapping is None:
            raise TypeError("a batch over a cache has slots")
        key, value = _context(options, first, length)
        write_kv(kv_cache, attn.kv_cache_spec, key, value, common.slot_mapping)


def _chunks(context: int) -> Iterator[tuple[int, int]]:
    for first in range(0, context, CHUNK):
        yield first, min(first + CHUNK, context)


def _context(options: argparse.Namespace, first: int, length: int) -> tuple[Tensor, Tensor]:
    """Return keys and values (B * length, Hkv, D), the same on all ranks."""
    generator = torch.Generator().manual_seed(first)
    shape = (2, options.batch * length, options.kv_heads, options.head_size)
    made = torch.randn(shape, generator=generator)
    made = made.to(device=options.device, dtype=getattr(torch, options.dtype))
    return made[0], made[1]


def _new_tokens(options: argparse.Namespace, position: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries (B, H, D) of all ranks, and keys and values (B, Hkv, D), of one step."""
    generator = torch.Generator().manual_seed(2**32 + position)
    heads = options.heads + 2 * options.kv_heads
    made = torch.randn(options.batch, heads, options.head_size, generator=generator)
    made = made.to(device=options.device, dtype=getattr(torch, options.dtype))
    query, key, value = made.split([options.heads, options.kv_heads, options.kv_heads], dim=1)
    return query, key.contiguous(), value.contiguous()


def _wait(options: argparse.Namespace) -> None:
    if options.device.startswith("cuda"):
        torch.cuda.synchronize()


def _difference(options: argparse.Namespace, query: Tensor, output: Tensor) -> float | None:
    """Return how far the last step is from that of one rank with all heads and the whole cache."""
    every = [output.contiguous()]
    if dist.is_initialized():
        every = [torch.empty_like(every[0]) for _ in range(_num_ranks())]
        dist.all_gather(every, output.contiguous())
    if _rank() != 0:
        return None
    alone = ContextParallel()
    attn = _layer(options, alone, options.heads)
    tokens = options.context + options.steps
    per_request = blocks_per_rank(tokens, BLOCK_SIZE, alone)
    kv_cache = attn.allocate(options.batch * per_request)
    table = torch.arange(options.batch * per_request).view(options.batch, per_request)
    _fill(options, attn, alone, kv_cache, table)
    expected = None
    for step in range(1, options.steps + 1):
        tokens = options.context + step
        query, key, value = _new_tokens(options, tokens - 1)
        common = sharded_batch(
            query_lens=[1] * options.batch,
            seq_lens=[tokens] * options.batch,
            block_table=table,
            block_size=BLOCK_SIZE,
            place=alone,
            device=options.device,
        )
        expected = attn.forward(query, key, value, kv_cache, attn.plan(common))
    if expected is None:
        return None
    return float((torch.cat(every, dim=1).float() - expected.float()).abs().max())


def _row(
    options: argparse.Namespace, attn: Attention, kv_cache: Tensor, seconds: Sequence[float]
) -> Row:
    ranks = _num_ranks()
    heads, width = attn.spec.num_heads, attn.spec.head_size
    element = attn.spec.dtype.itemsize
    queries = options.batch * heads * width * element * (ranks - 1)
    combine = options.combine or "ag_rs"
    every = options.batch * options.heads
    outputs = {
        "ag_rs": every * 4 * (ranks - 1) + every * width * 4 * (ranks - 1) // ranks,
        "a2a": every * (width * element + 4) * (ranks - 1) // ranks,
    }[combine]
    return {
        "ranks": ranks,
        "backend": attn.selection.chosen,
        "device": options.device.split(":")[0],
        "context": options.context,
        "batch": options.batch,
        "combine": combine if ranks > 1 else None,
        "cache of a rank, MiB": round(kv_cache.numel() * kv_cache.itemsize / 2**20, 1),
        "bytes that a rank sends per step": queries + outputs,
        "median step, ms": round(statistics.median(seconds) * 1e3, 3),
        "fastest step, ms": round(min(seconds) * 1e3, 3),
        "torch": torch.__version__,
    }


def _show(row: Row) -> None:
    width = max(map(len, row))
    for name, value in row.items():
        sys.stdout.write(f"{name:{width}}  {value}\n")


if __name__ == "__main__":
    raise SystemExit(main())
