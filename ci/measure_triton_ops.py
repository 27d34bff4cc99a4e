"""Time cache writes and merges on a GPU, and what a launch costs the host.

    python ci/measure_triton_ops.py results.json

prints tables and writes the same as JSON. GPU times are of calls captured in a graph and replayed,
each call on tensors of its own so that nothing is found in the L2 cache; beside each stands a plain
copy of as many bytes, and what torch takes for the same. Contenders alternate; figures are medians.
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from attn_shared import kv_write as by_torch
from attn_shared import merge as merge_by_torch
from attn_shared.kv_cache import FullAttentionSpec, KVCacheLayout
from attn_triton.kernels.kv_write import write_kv as kernel
from attn_triton.kv_write import write_kv
from attn_triton.launch import Launcher
from attn_triton.merge import merge_attn_states

__all__ = ["main"]

ROUNDS = 15
HEADS, SIZE, BLOCK = 8, 128, 16
QUERY_HEADS = 32
ROTATED_BYTES = 200e6  # several times the L2 cache
MOST_CALLS = 24
FORMATS = {
    "bf16": ("auto", torch.bfloat16),
    "fp8": ("fp8_e4m3", torch.float8_e4m3fn),
    "int8": ("int8_per_token_head", torch.int8),
}
Call = Callable[[], object]


def captured(calls: list[Call]) -> torch.cuda.CUDAGraph:
    """The calls as one graph; each has run before, so that it is compiled."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def replay_us(contenders: dict[str, list[Call]]) -> dict[str, float]:
    """The median time of one call of each contender, in microseconds."""
    graphs = {name: captured(calls) for name, calls in contenders.items()}
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) * 1e3 / len(contenders[name]))
    return {name: statistics.median(found[1:]) for name, found in times.items()}


def number_of_calls(bytes_of_call: float) -> int:
    """How many calls go into a graph: enough to leave the L2 cache, not too many."""
    return max(4, min(MOST_CALLS, round(ROTATED_BYTES / bytes_of_call) + 1))


def write_case(name: str, layout: str, tokens: int) -> dict[str, Any]:
    """Time one write of `tokens` tokens into a cache of this format."""
    kv_cache_dtype, dtype = FORMATS[name]
    spec = FullAttentionSpec(
        block_size=BLOCK,
        num_kv_heads=HEADS,
        head_size=SIZE,
        head_size_v=SIZE,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        layout=KVCacheLayout(layout),
    )
    moved = 2 * tokens * HEADS * SIZE * (2 + dtype.itemsize)
    count = number_of_calls(moved)
    blocks = -(-tokens // BLOCK) * 2
    caches = [spec.allocate(blocks, "cuda") for _ in range(count)]
    rows = torch.randn(count, 2, tokens, HEADS, SIZE, device="cuda", dtype=torch.bfloat16)
    slots = torch.randperm(blocks, device="cuda")[: -(-tokens // BLOCK), None] * BLOCK
    slots = (slots + torch.arange(BLOCK, device="cuda")).flatten()[:tokens].contiguous()
    scales = {"k_scale": 0.5, "v_scale": 0.25} if name == "fp8" else {}
    source = torch.randint(100, (count, moved // 2), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)

    def writer(write: Callable[..., None]) -> list[Call]:
        return [
            lambda i=i: write(caches[i], spec, *rows[i], slots, **scales)  # type: ignore[misc]
            for i in range(count)
        ]

    copies: list[Call] = [
        lambda i=i: target[i].copy_(source[i])  # type: ignore[misc]
        for i in range(count)
    ]
    contenders = {"triton": writer(write_kv), "copy": copies, "torch": writer(by_torch.write_kv)}
    return {"case": f"{name} {layout} {tokens}", "bytes": moved, **replay_us(contenders)}


def merge_case(tokens: int) -> dict[str, Any]:
    """Time one merge of `tokens` tokens."""
    elements = tokens * QUERY_HEADS * SIZE
    moved = 3 * (2 * elements + 4 * tokens * QUERY_HEADS)
    count = number_of_calls(moved)
    shape = (count, 3, tokens, QUERY_HEADS, SIZE)
    outputs = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    lses = torch.randn(count, 3, QUERY_HEADS, tokens, device="cuda")
    source = torch.randint(100, (count, moved // 2), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)

    def merger(merge: Callable[..., Any]) -> list[Call]:
        def call(i: int) -> None:
            (a, b, out), (x, y, lse) = outputs[i], lses[i]
            merge(a, x, b, y, output=out, output_lse=lse)

        return [lambda i=i: call(i) for i in range(count)]  # type: ignore[misc]

    copies: list[Call] = [
        lambda i=i: target[i].copy_(source[i])  # type: ignore[misc]
        for i in range(count)
    ]
    contenders = {
        "triton": merger(merge_attn_states),
        "copy": copies,
        "torch": merger(merge_by_torch.merge_attn_states),
    }
    return {"case": f"merge {tokens}", "bytes": moved, **replay_us(contenders)}


def host_us(call: Call, count: int = 300) -> float:
    """What a call costs the host, in microseconds: the GPU works for less than that."""
    found = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            call()
        found.append((time.perf_counter() - start) * 1e6 / count)
    return statistics.median(found[1:])


def host_costs() -> dict[str, float]:
    """What the ways to launch one kernel, and the calls around it, cost the host."""
    spec = FullAttentionSpec(
        block_size=BLOCK, num_kv_heads=HEADS, head_size=SIZE, head_size_v=SIZE, dtype=torch.bfloat16
    )
    cache = spec.allocate(8, "cuda")
    key, value = torch.randn(2, 1, HEADS, SIZE, device="cuda", dtype=torch.bfloat16)
    slots = torch.tensor([5], device="cuda")
    widths = {"KEY": SIZE, "VALUE": SIZE}
    constants: dict[str, object] = {"HEADS": HEADS, "BLOCK_SIZE": BLOCK, "ROWS": 16}
    for side, width in widths.items():
        constants |= {f"{side}_SIZE": width, f"{side}_WIDTH": width, f"{side}_STEP": 1}
        constants[f"{side}_VECTOR"] = 8
    constants |= {"CACHE_VECTOR": 8, "STORED": 0, "K_SCALE": 0, "V_SCALE": 0}
    strides = (1, 128, 16, 128, 16, 4096, 128, 16, 2048)
    args = (key, value, cache, slots, 1.0, 1.0, HEADS, *strides)
    launcher = Launcher(kernel, constants)
    handle = launcher.handle(*args)
    addresses = tuple(x.data_ptr() if isinstance(x, torch.Tensor) else x for x in args)
    a, b, out = torch.randn(3, 1, QUERY_HEADS, SIZE, device="cuda", dtype=torch.bfloat16)
    x, y, lse = torch.randn(3, QUERY_HEADS, 1, device="cuda")
    grid = (1, 1, 1)
    calls: dict[str, Call] = {
        "kernel[grid], 16 arguments and 15 constants": lambda: kernel[grid](
            *args, **constants, num_warps=4
        ),
        "Launcher, 16 arguments": lambda: launcher(grid, *args),
        "Handle, tensors": lambda: handle(grid, *args),
        "Handle, addresses": lambda: handle(grid, *addresses),
        "write_kv": lambda: write_kv(cache, spec, key, value, slots),
        "write_kv of torch": lambda: by_torch.write_kv(cache, spec, key, value, slots),
        "merge_attn_states, outputs given": lambda: merge_attn_states(
            a, x, b, y, output=out, output_lse=lse
        ),
        "merge_attn_states": lambda: merge_attn_states(a, x, b, y),
        "merge_attn_states of torch": lambda: merge_by_torch.merge_attn_states(a, x, b, y),
        "a torch kernel (add_)": lambda: lse.add_(1.0),
    }
    for call in calls.values():
        call()
    return {name: host_us(call) for name, call in calls.items()}


def shown(item: dict[str, Any]) -> str:
    """One line of the table."""
    rate = item["bytes"] / item["triton"] / 1e6
    return (
        f"{item['case']:<18} {item['bytes'] / 1e6:8.2f} MB  triton {item['triton']:7.2f} us "
        f"{rate:5.2f} TB/s  copy {item['copy']:7.2f} us  torch {item['torch']:8.2f} us"
    )


def main(path: str) -> int:
    """Measure, print, and write JSON after every part."""
    import triton

    record: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "host_us": host_costs(),
        "gpu_us": [],
    }
    for name, cost in record["host_us"].items():
        print(f"host: {name:<46} {cost:7.2f} us", flush=True)
    cases: list[Call] = [
        lambda n=name, y=layout, t=tokens: write_case(n, y, t)  # type: ignore[misc]
        for name, layout, sizes in (
            ("bf16", "NHD", (1, 32, 256, 2048, 8192)),
            ("bf16", "HND", (256, 8192)),
            ("fp8", "NHD", (256, 8192)),
            ("int8", "NHD", (256, 8192)),
        )
        for tokens in sizes
    ]
    cases += [lambda t=tokens: merge_case(t) for tokens in (32, 256, 2048, 8192)]  # type: ignore[misc]
    for case in cases:
        item: Any = case()
        record["gpu_us"].append(item)
        print(shown(item), flush=True)
        Path(path).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
