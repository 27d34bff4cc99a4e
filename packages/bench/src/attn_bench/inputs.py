"""Tensors of a workload: random data, shuffled blocks, and several layers where a cache helps.

The layers of a model share a step's batch and block table, and each has a cache of its own. The
copies made here are such layers: one plan serves them all, as it does in an engine.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attn_bench.workloads import Workload
from attn_shared.dtypes import KVQuantMode
from attn_shared.kv_cache import AttentionSpec, KVViews, MLAAttentionSpec
from attn_shared.kv_write import gather_rows
from attn_shared.metadata import CommonAttentionMetadata

__all__ = [
    "LayerTensors",
    "Step",
    "block_table_of",
    "make_step",
    "new_keys_of",
    "stored_keys_of",
]

_INT8_SCALE = 4.0 / 127  # entries then reach as far as those of a normal distribution
_FILL_ELEMENTS = 2**24  # made in float32 at once; that of a whole cache may not fit


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerTensors:
    """One layer's tensors.

    Attributes:
        query: (T, Hq, D).
        kv_cache: a filled cache.
        output: (T, Hq, Dv), NaN so far.
    """

    query: Tensor
    kv_cache: Tensor
    output: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Step:
    """A batch, and the layers that run it.

    Attributes:
        common: the batch.
        spec: format of the caches.
        layers: at least one.
    """

    common: CommonAttentionMetadata
    spec: AttentionSpec | MLAAttentionSpec
    layers: tuple[LayerTensors, ...]


def block_table_of(workload: Workload, block_size: int, seed: int) -> tuple[Tensor, int]:
    """Return a table of shuffled blocks (B, M) int32 and how many blocks there are.

    Requests share the whole blocks of the shared prefix; any other block belongs to one request.
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
    workload: Workload,
    spec: AttentionSpec | MLAAttentionSpec,
    device: torch.device,
    num_layers: int,
    seed: int = 0,
) -> Step:
    """Return random inputs; zeros would run faster than real data on some devices."""
    table, num_blocks = block_table_of(workload, spec.block_size, seed)
    generator = torch.Generator(device).manual_seed(seed)
    common = CommonAttentionMetadata.from_lengths(
        query_lens=workload.query_lens,
        seq_lens=workload.seq_lens,
        block_table=table,
        block_size=spec.block_size,
        device=device,
    )
    layers = tuple(_make_layer(workload, spec, num_blocks, generator) for _ in range(num_layers))
    return Step(common=common, spec=spec, layers=layers)


def _make_layer(
    workload: Workload,
    spec: AttentionSpec | MLAAttentionSpec,
    num_blocks: int,
    generator: torch.Generator,
) -> LayerTensors:
    heads, device = workload.heads, generator.device
    shape = (workload.num_tokens, heads.num_heads, heads.head_size)
    query = torch.randn(shape, generator=generator, device=device).to(workload.dtype)
    kv_cache = spec.allocate(num_blocks, device)
    _fill(spec.split(kv_cache), spec.quant_mode, generator)
    output = query.new_full((*shape[:2], heads.value_size), torch.nan)
    return LayerTensors(query=query, kv_cache=kv_cache, output=output)


def _fill(views: KVViews, mode: KVQuantMode, generator: torch.Generator) -> None:
    for view in (views.key, views.value):
        step = max(1, _FILL_ELEMENTS // max(1, view[0].numel()))
        for start in range(0, view.shape[0], step):
            part = view[start : start + step]
            values = torch.randn(part.shape, generator=generator, device=part.device)
            if mode is KVQuantMode.INT8_PER_TOKEN_HEAD:
                values = (values / _INT8_SCALE).round_().clamp_(-127, 127)
            part.copy_(values)
    scale = _INT8_SCALE if mode is KVQuantMode.INT8_PER_TOKEN_HEAD else 1.0
    for scales in (views.key_scale, views.value_scale):
        if scales is not None:
            scales.fill_(scale)


def stored_keys_of(step: Step, layer: LayerTensors, request: int, length: int) -> KVViews:
    """Return the first `length` keys and values of a request as stored, (length, Hkv, D)."""
    table = step.common.block_table
    if table is None:
        raise TypeError("a step of make_step has a block table")
    views = (
        None if view is None else gather_rows(view, table[request], length)
        for view in step.spec.split(layer.kv_cache)
    )
    key, value, key_scale, value_scale = views
    if key is None or value is None:
        raise TypeError("a cache has keys and values")
    return KVViews(key, value, key_scale, value_scale)


def new_keys_of(step: Step, layer: LayerTensors) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Return the step's keys and values (T, Hkv, D) as an engine has them beside the cache.

    None of a quantised cache, which does not hold what they were before.
    """
    slots = step.common.slot_mapping
    if step.spec.is_quantized or slots is None:
        return None, None
    block, offset = slots // step.spec.block_size, slots % step.spec.block_size
    views = step.spec.split(layer.kv_cache)
    return views.key[block, offset], views.value[block, offset]
