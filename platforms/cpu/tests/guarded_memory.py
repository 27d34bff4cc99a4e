"""Tensors whose neighbours cannot be read: each ends, or begins, at a page without permissions.

    python guarded_memory.py

runs the kernels of every level over such tensors and prints what was run; a read or write outside
ends the process with SIGSEGV.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import sys
from typing import Any

import torch
from attn_cpu_testing import (
    NAMES,
    attention_arguments,
    cached_arguments,
    levels,
    plan_of,
    run,
    write_arguments,
)
from torch import Tensor

from attn_cpu.isa import level_named

__all__ = ["guarded", "hide", "main"]

PAGE = mmap.PAGESIZE
_PROT_NONE = 0
_LIBC = ctypes.CDLL(None, use_errno=True)
_MANY = 20  # queries of two heads each: rows enough for the kernels of many rows


def hide(address: int, num_bytes: int) -> None:
    """Take all permissions from whole pages."""
    code = _LIBC.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), _PROT_NONE)
    if code:
        raise OSError(ctypes.get_errno(), "mprotect failed")


def _mapped(num_bytes: int) -> tuple[Tensor, int]:
    """Return fresh pages as bytes, which live as long as a tensor over them, and their address."""
    pages = torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)
    return pages, pages.data_ptr()


def guarded(source: Tensor, *, at_end: bool) -> Tensor:
    """Return a copy, strides kept, with a page nobody may touch right behind it or before it."""
    span = 1 + sum((n - 1) * s for n, s in zip(source.shape, source.stride(), strict=True))
    num_bytes = span * source.dtype.itemsize if source.numel() else 0
    room = -(-max(num_bytes, 1) // PAGE) * PAGE
    pages, address = _mapped(room + 2 * PAGE)
    start = PAGE + (room - num_bytes if at_end else 0)
    copy = pages[start : start + num_bytes].view(source.dtype)
    copy = copy.as_strided(source.shape, source.stride()).copy_(source)
    hide(address, PAGE)
    hide(address + PAGE + room, PAGE)
    return copy


def _paged(
    dtype: torch.dtype, size: int, block: int, layout: str, *, first: int = 1, **changes: Any
) -> dict[str, Any]:
    """Return a right call whose lengths end at odd places, the first with `first` queries."""
    generator = torch.Generator().manual_seed(0)
    lens, queries = [3 * block - 1, 1, block + 1], [first, 1, 5]

    def cache() -> Tensor:
        made = torch.randn(6, block, 2, size, generator=generator).to(dtype)
        return made if layout == "NHD" else made.transpose(1, 2).contiguous().transpose(1, 2)

    arguments = attention_arguments(dtype) | {
        "query": torch.randn(sum(queries), 4, size, generator=generator).to(dtype),
        "out": torch.zeros(sum(queries), 4, size, dtype=dtype),
        "lse": torch.zeros(4, sum(queries)),
        "key": cache(),
        "value": cache(),
        "block_table": torch.tensor([[2, 5, 0], [1, 0, 0], [3, 4, 0]], dtype=torch.int32),
        "query_start_loc": torch.tensor([0, *queries]).cumsum(0).int(),
        "seq_lens": torch.tensor(lens, dtype=torch.int32),
        "scale": size**-0.5,
    }
    arguments |= changes
    arguments["plan"] = plan_of(arguments)
    return arguments


def _run_all(level: str, arguments: dict[str, Any]) -> None:
    for at_end in (True, False):
        tensors = {
            name: guarded(arguments[name], at_end=at_end)
            for name in NAMES
            if arguments[name] is not None
        }
        run(arguments | tensors | {"isa": level_named(level)})
    _run_cached(level, arguments)


def _run_cached(level: str, arguments: dict[str, Any]) -> None:
    """The same by the short call, where that serves it."""
    own = ("sinks", "alibi_slopes", "mm_prefix_ranges", "causal_per_request", "key_scales")
    if any(arguments[name] is not None for name in own):
        return
    cached = cached_arguments(arguments | {"isa": level_named(level)})
    for at_end in (True, False):
        tensors = {
            name: guarded(value, at_end=at_end)
            for name, value in cached.items()
            if isinstance(value, Tensor)
        }
        torch.ops.attn_cpu.attention_cached(**(cached | tensors))
        _run_written(cached | tensors, at_end=at_end)


def _run_written(cached: dict[str, Any], *, at_end: bool) -> None:
    """The same with the step's keys, whose slots are the cache's first and last."""
    query, cache = cached["query"], cached["kv_cache"]
    num_tokens, num_slots = len(query), len(cache) * cache.shape[2]
    slots = torch.arange(num_tokens)
    slots[num_tokens // 2 :] += num_slots - num_tokens
    slots[0] = -1
    rows = query.new_ones(num_tokens, *cache.shape[3:])
    own = {name: value for name, value in cached.items() if not name.startswith("new_")}
    tensors = {"key": rows, "value": rows, "slot_mapping": slots}
    tensors = {name: guarded(value, at_end=at_end) for name, value in tensors.items()}
    torch.ops.attn_cpu.write_and_attend(**(own | tensors))


def _attention(level: str) -> int:
    cases = 0
    for dtype, size, block, layout, first in itertools.product(
        (torch.float32, torch.bfloat16, torch.float16),
        (32, 40, 64, 128, 200),
        (8, 16),
        ("HND", "NHD"),
        (1, _MANY),
    ):
        _run_all(level, _paged(dtype, size, block, layout, first=first))
        cases += 1
    for dtype, cached, first in itertools.product(
        (torch.float32, torch.bfloat16),
        (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8),
        (1, _MANY),
    ):
        arguments = _paged(dtype, 64, 16, "HND", first=first)
        for name in ("key", "value"):
            arguments[name] = arguments[name].to(cached)
        if cached is torch.int8:
            arguments |= {f"{name}_scales": torch.ones(6, 16, 2) for name in ("key", "value")}
        else:
            arguments |= {f"{name}_scale": torch.ones(2) for name in ("k", "v")}
        _run_all(level, arguments)
        cases += 1
    for first in (1, _MANY):
        _run_all(level, _masked(first))
        cases += 1
    return cases


def _masked(first: int) -> dict[str, Any]:
    return _paged(
        torch.float32,
        64,
        16,
        "NHD",
        first=first,
        sinks=torch.zeros(4),
        alibi_slopes=torch.ones(4) / 4,
        mm_prefix_ranges=torch.tensor([[2, 3, 9]], dtype=torch.int32),
        causal_per_request=torch.tensor([True, False, True]),
        window_left=9,
        window_right=2,
    )


def _unused_blocks(level: str) -> int:
    """Blocks of whole pages: those that no request names are hidden one by one."""
    for dtype in (torch.float32, torch.bfloat16):
        block = PAGE // (2 * 64 * dtype.itemsize)
        table = torch.tensor([[2, 5, 2], [0, 0, 0], [3, 2, 0]], dtype=torch.int32)
        arguments = _paged(dtype, 64, block, "HND", block_table=table)
        for name in ("key", "value"):
            source = arguments[name]
            pages, address = _mapped(source.numel() * dtype.itemsize)
            copy = pages.view(dtype).as_strided(source.shape, source.stride()).copy_(source)
            lens = arguments["seq_lens"].tolist()
            used = {
                int(block_id)
                for row, length in zip(arguments["block_table"], lens, strict=True)
                for block_id in row[: -(-length // block)]
            }
            for block_id in set(range(6)) - used:
                hide(address + block_id * PAGE, PAGE)
            if used == set(range(6)):
                raise AssertionError("nothing is hidden")
            arguments[name] = copy
        run(arguments | {"isa": level_named(level)})
    return 2


def _writes() -> int:
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    for dtype, at_end in itertools.product(dtypes, (True, False)):
        arguments = write_arguments(dtype)
        tensors = {
            name: guarded(value, at_end=at_end)
            for name, value in arguments.items()
            if isinstance(value, Tensor)
        }
        torch.ops.attn_cpu.write_kv(**(arguments | tensors))
    return 2 * len(dtypes)


def main() -> int:
    """Run all, and print how many calls that were."""
    for level in levels():
        sys.stdout.write(f"{level} {_attention(level)} {_unused_blocks(level)}\n")
    sys.stdout.write(f"writes {_writes()}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
