"""Calls of the op drawn at random: requests of many rows beside short ones, any mask and rule."""

from __future__ import annotations

import random
from typing import Any

import torch
from attn_cpu_testing import attention_arguments, plan_of, run
from torch import Tensor

from attn_shared.accuracy import check_against_reference, eager_attention
from attn_shared.reference import AttentionOptions, paged_attention

__all__ = ["alone", "drawn", "problems", "together"]

_SIZES = (8, 16, 40, 64, 72, 80, 96, 128, 192, 256, 320)
_BLOCKS = (1, 3, 16, 64, 128, 256)
_CACHES = (None, None, None, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
_NUM_BLOCKS_SPARE = 3


def _lengths(rng: random.Random, most: int) -> tuple[list[int], list[int]]:
    """Draw (query_lens, seq_lens) of one to four requests, one of which has many rows."""
    queries = [
        rng.choice((1, 2, 7, 16, 33, rng.randint(1, most))) for _ in range(rng.randint(0, 3))
    ]
    queries.insert(rng.randint(0, len(queries)), rng.randint(most // 2, most))
    old = (0, 0, 1, 127, 128, 500, rng.randint(0, 1500))
    return queries, [query + rng.choice(old) for query in queries]


def _masks(rng: random.Random, queries: list[int], lens: list[int]) -> dict[str, Any]:
    found: dict[str, Any] = {"causal": rng.random() < 0.8}
    if rng.random() < 0.3:
        flags = [rng.random() < 0.5 for _ in queries]
        found["causal_per_request"] = torch.tensor(flags)
    if rng.random() < 0.35:
        found["window_left"] = rng.choice((0, 5, 63, 128, 200, 700))
    if rng.random() < 0.15:
        found["window_right"] = rng.choice((0, 9, 130))
    if found["causal"] and "causal_per_request" not in found and rng.random() < 0.15:
        found["chunk_size"] = rng.choice((1, 50, 128, 300))
    if rng.random() < 0.25:
        rows = []
        for request, length in enumerate(lens):
            for _ in range(rng.randint(0, 2)):
                first = rng.randrange(length)
                rows.append([request, first, min(length - 1, first + rng.randint(0, 300))])
        if rows:
            found["mm_prefix_ranges"] = torch.tensor(rows, dtype=torch.int32)
    return found


def _rules(rng: random.Random, heads: int, size: int, generator: torch.Generator) -> dict[str, Any]:
    found: dict[str, Any] = {"scale": rng.choice((1, 1, 1, 1.5, -1, 0)) * size**-0.5}
    if rng.random() < 0.2:
        found["softcap"] = rng.choice((2.0, 30.0))
    if rng.random() < 0.25:
        found["sinks"] = torch.randn(heads, generator=generator)
    if rng.random() < 0.2:
        found["alibi_slopes"] = torch.rand(heads, generator=generator) * 0.5
    return found


def _caches(
    rng: random.Random,
    shape: tuple[int, ...],
    size_v: int,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> dict[str, Any]:
    cached = rng.choice(_CACHES)
    found: dict[str, Any] = {}
    is_hnd = rng.random() < 0.5
    for name, size in (("key", shape[-1]), ("value", size_v)):
        made = torch.randn(*shape[:-1], size, generator=generator)
        made = (made * 30).round().clamp(-127, 127) if cached is torch.int8 else made
        made = made.to(cached or dtype)
        found[name] = made.transpose(1, 2).contiguous().transpose(1, 2) if is_hnd else made
    if cached is torch.int8:
        found |= {
            f"{name}_scales": torch.rand(shape[:-1], generator=generator) / 20 + 0.01
            for name in ("key", "value")
        }
    elif cached is not None:
        found |= {f"{name}_scale": torch.tensor([rng.choice((0.5, 1.0, 2.0))]) for name in "kv"}
    return found


def drawn(seed: int, dtype: torch.dtype, most: int = 400) -> dict[str, Any]:
    """Return the arguments of a call, the same ones for a seed every time."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    group, kv_heads = rng.choice((1, 2, 3, 4, 8)), rng.choice((1, 2))
    size, size_v = (
        (rng.choice(_SIZES), rng.choice(_SIZES))
        if rng.random() < 0.4
        else (rng.choice(_SIZES),) * 2
    )
    block = rng.choice(_BLOCKS)
    queries, lens = _lengths(rng, most // group)
    per_request = [-(-length // block) for length in lens]
    num_blocks = sum(per_request) + _NUM_BLOCKS_SPARE
    order = torch.randperm(num_blocks, generator=generator).int()
    table = torch.zeros(len(lens), max(per_request), dtype=torch.int32)
    for request, count in enumerate(per_request):
        start = sum(per_request[:request])
        table[request, :count] = order[start : start + count]
    heads, tokens = group * kv_heads, sum(queries)
    arguments = attention_arguments(
        dtype,
        query=torch.randn(tokens, heads, size, generator=generator).to(dtype),
        out=torch.full((tokens, heads, size_v), 7.0, dtype=dtype),
        lse=torch.zeros(heads, tokens) if rng.random() < 0.6 else None,
        block_table=table,
        query_start_loc=torch.tensor([0, *queries]).cumsum(0).int(),
        seq_lens=torch.tensor(lens, dtype=torch.int32),
    )
    arguments |= _caches(rng, (num_blocks, block, kv_heads, size), size_v, dtype, generator)
    arguments |= _masks(rng, queries, lens) | _rules(rng, heads, size, generator)
    return arguments


def _options(arguments: dict[str, Any]) -> AttentionOptions:
    return AttentionOptions(
        window=(arguments["window_left"], arguments["window_right"]),
        **{
            name: arguments[name]
            for name in ("scale", "softcap", "alibi_slopes", "sinks", "chunk_size")
        },
    )


def _batch(arguments: dict[str, Any]) -> dict[str, Any]:
    ranges: dict[int, list[tuple[int, int]]] = {}
    if arguments["mm_prefix_ranges"] is not None:
        for request, first, last in arguments["mm_prefix_ranges"].tolist():
            ranges.setdefault(request, []).append((first, last))
    flags = arguments["causal_per_request"]
    found = {name: arguments[name] for name in ("query_start_loc", "seq_lens", "block_table")}
    found |= {
        f"{name}_scale": arguments[f"{name}_scale"]
        for name in "kv"
        if arguments[f"{name}_scale"] is not None
    }
    found |= {
        name: arguments[name]
        for name in ("key_scales", "value_scales")
        if arguments[name] is not None
    }
    return found | {
        "causal": arguments["causal"] if flags is None else flags,
        "mm_prefix_ranges": ranges,
    }


def problems(
    arguments: dict[str, Any], levels: dict[str, int], num_threads: int = 1
) -> dict[str, Any]:
    """Run a call on each level; what is wrong there by the contract's budget."""
    query, key, value = (arguments[name] for name in ("query", "key", "value"))
    options, batch, dtype = _options(arguments), _batch(arguments), query.dtype
    exact = paged_attention(query, key, value, options, **batch)
    eager = eager_attention(query, key, value, options, **batch, compute_dtype=dtype)
    arguments = arguments | {"plan": plan_of(arguments, num_threads=num_threads)}
    found = {}
    for label, isa in levels.items():
        arguments["out"].fill_(7.0)
        got = run(arguments | {"isa": isa})
        report = check_against_reference(got, arguments["lse"], exact, eager, dtype=dtype)
        if not report.ok:
            found[label] = report
    return found


def together(arguments: dict[str, Any], isa: int, num_threads: int = 2) -> Tensor:
    """Return the output of the whole batch in batch-invariant mode."""
    plan = plan_of(arguments, num_threads=num_threads, is_invariant=True)
    return run(arguments | {"plan": plan, "isa": isa, "out": torch.empty_like(arguments["out"])})


def alone(arguments: dict[str, Any], request: int, isa: int) -> tuple[slice, Tensor]:
    """Return where a request's rows are, and its output in a batch of its own."""
    begin, end = arguments["query_start_loc"][request : request + 2].tolist()
    rows = slice(begin, end)
    ranges, flags, lse = (
        arguments[name] for name in ("mm_prefix_ranges", "causal_per_request", "lse")
    )
    own = arguments | {
        "query": arguments["query"][rows],
        "out": torch.empty_like(arguments["out"][rows]),
        "lse": None if lse is None else torch.empty_like(lse[:, rows]).contiguous(),
        "block_table": arguments["block_table"][request : request + 1],
        "query_start_loc": torch.tensor([0, end - begin], dtype=torch.int32),
        "seq_lens": arguments["seq_lens"][request : request + 1],
        "causal_per_request": None if flags is None else flags[request : request + 1],
    }
    if ranges is not None:
        mine = ranges[ranges[:, 0] == request].clone()
        mine[:, 0] = 0
        own["mm_prefix_ranges"] = mine if len(mine) else None
    own["plan"] = plan_of(own, num_threads=1, is_invariant=True)
    return rows, run(own | {"isa": isa})
