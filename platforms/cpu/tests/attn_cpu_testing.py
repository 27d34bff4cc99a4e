"""What the tests of the kernels share: whether there are any, and the arguments of a right call."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor

__all__ = [
    "NAMES",
    "attention_arguments",
    "cached_arguments",
    "levels",
    "needs_kernels",
    "plan_of",
    "run",
    "write_arguments",
]

needs_kernels = pytest.mark.skipif(
    importlib.util.find_spec("attn_cpu_kernels") is None,
    reason="attn-cpu was built without kernels",
)

HEADS, KV_HEADS, SIZE, BLOCK, BLOCKS = 4, 2, 32, 8, 6
QUERY_LENS, SEQ_LENS = (1, 3, 0), (13, 9, 0)


def levels() -> list[str]:
    """Return the names of the levels that run here; none without kernels."""
    if importlib.util.find_spec("attn_cpu_kernels") is None:
        return []
    from attn_cpu.isa import supported_levels

    return [level.label for level in supported_levels()]


def _starts(lens: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lens]).cumsum(0).int()


def attention_arguments(dtype: torch.dtype = torch.float32, **changes: Any) -> dict[str, Any]:
    """Return the arguments of a right call over a paged cache, by name, with some changed."""
    generator = torch.Generator().manual_seed(0)

    def rows(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    arguments: dict[str, Any] = {
        "query": rows(sum(QUERY_LENS), HEADS, SIZE),
        "out": torch.zeros(sum(QUERY_LENS), HEADS, SIZE, dtype=dtype),
        "lse": torch.zeros(HEADS, sum(QUERY_LENS)),
        "key": rows(BLOCKS, BLOCK, KV_HEADS, SIZE),
        "value": rows(BLOCKS, BLOCK, KV_HEADS, SIZE),
        "block_table": torch.tensor([[4, 1], [0, 5], [0, 0]], dtype=torch.int32),
        "query_start_loc": _starts(QUERY_LENS),
        "seq_lens": torch.tensor(SEQ_LENS, dtype=torch.int32),
        "key_start_loc": None,
        "plan": None,
        "workspace": None,
        "scale": SIZE**-0.5,
        "softcap": None,
        "window_left": None,
        "window_right": None,
        "chunk_size": None,
        "causal": True,
        "causal_per_request": None,
        "sinks": None,
        "alibi_slopes": None,
        "k_scale": None,
        "v_scale": None,
        "key_scales": None,
        "value_scales": None,
        "mm_prefix_ranges": None,
        "checked": True,
        "isa": -1,
    }
    arguments["plan"] = plan_of(arguments)
    return arguments | changes


NAMES = (
    *("query", "out", "lse", "key", "value", "block_table", "query_start_loc", "seq_lens"),
    *("key_start_loc", "plan", "workspace", "causal_per_request", "sinks", "alibi_slopes"),
    *("k_scale", "v_scale", "key_scales", "value_scales", "mm_prefix_ranges"),
)
"""The arguments that are tensors."""


def plan_of(arguments: dict[str, Any], num_threads: int = 2, is_invariant: bool = False) -> Tensor:
    """Return the plan of a call."""
    from attn_cpu._vendor.attn_cpu_kernels import load

    load()
    plan: Tensor = torch.ops.attn_cpu.plan(
        arguments["query_start_loc"],
        arguments["seq_lens"],
        arguments["query"].shape[1],
        arguments["key"].shape[-2],
        arguments["query"].shape[2],
        arguments["value"].shape[-1],
        arguments["causal"],
        arguments["causal_per_request"],
        arguments["window_left"],
        arguments["window_right"],
        arguments["chunk_size"],
        arguments["mm_prefix_ranges"] is not None,
        num_threads,
        is_invariant,
    )
    return plan


def run(arguments: dict[str, Any]) -> Tensor:
    """Call the op, and return its output."""
    torch.ops.attn_cpu.attention(**arguments)
    return arguments["out"]


def cached_arguments(
    arguments: dict[str, Any], softcap: float = 0.0, scales: tuple[float, float] = (1.0, 1.0)
) -> dict[str, Any]:
    """Return the arguments of `attention_cached` that ask what these of `attention` ask.

    Args:
        arguments: over a paged cache, without options of a head's or a request's own.
        softcap: 0: off.
        scales: of keys and values, of an fp8 cache.
    """
    key, query = arguments["key"], arguments["query"]
    stored = (torch.float32, torch.bfloat16, torch.float16)
    stored += (torch.float8_e4m3fn, torch.float8_e5m2)
    dtypes = (stored.index(query.dtype), stored.index(key.dtype))
    heads = (query.shape[1], key.shape[2], query.shape[2])
    layer = (arguments["scale"], softcap, *scales, *dtypes, key.shape[1], *heads)
    return {
        "query": query,
        "out": torch.zeros_like(arguments["out"]),
        "new_key": None,
        "new_value": None,
        "kv_cache": _joined(key, arguments["value"]),
        "block_table": arguments["block_table"],
        "plan": arguments["plan"],
        "workspace": arguments["workspace"],
        "layer": torch.tensor(layer, dtype=torch.float64),
        "isa": arguments["isa"],
    }


def _joined(key: Tensor, value: Tensor) -> Tensor:
    """Return keys and values in one cache, whose rows and heads lie in the keys' order."""
    is_hnd = key.stride(2) > key.stride(1)
    pair = (key.transpose(1, 2), value.transpose(1, 2)) if is_hnd else (key, value)
    cache = torch.stack([each.view(torch.uint8) for each in pair], 1).view(key.dtype)
    return cache.transpose(2, 3) if is_hnd else cache


def write_arguments(dtype: torch.dtype = torch.float32, **changes: Any) -> dict[str, Any]:
    """Return the arguments of a right write, by name, with some changed."""
    generator = torch.Generator().manual_seed(0)
    arguments: dict[str, Any] = {
        "key": torch.randn(5, KV_HEADS, SIZE, generator=generator).to(dtype),
        "value": torch.randn(5, KV_HEADS, SIZE, generator=generator).to(dtype),
        "key_cache": torch.zeros(BLOCKS, BLOCK, KV_HEADS, SIZE, dtype=dtype),
        "value_cache": torch.zeros(BLOCKS, BLOCK, KV_HEADS, SIZE, dtype=dtype),
        "slot_mapping": torch.tensor([3, -1, 47, 8, 20]),
        "k_scale": None,
        "v_scale": None,
        "key_scales": None,
        "value_scales": None,
        "checked": True,
    }
    return arguments | changes
