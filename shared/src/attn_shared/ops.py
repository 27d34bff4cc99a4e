"""The operator `attn::forward`, through which a compiled graph calls a layer.

    with attn_shared.ops.step(plan):
        output = compiled_model(hidden_states)

Inside the graph, `attend(layer, query, key, value, kv_cache)` becomes one call of
`attn::forward(query, key, value, kv_cache, output, handle)`, which mutates kv_cache and output.
`handle` is the layer's number in the process's table; the step's plan is set outside the graph.
That table and that plan are the one ambient state of attn, and only this operator reads them.
`attn::mla_forward` is the same for latent attention, through `attend_latents`.

`attn::concat_and_cache_mla` writes latents and rope parts as entries of a cache, for callers whose
layers are not attn's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from attn_shared._handles import layer_of
from attn_shared.dtypes import dtype_name
from attn_shared.errors import InvalidInputError
from attn_shared.gradients import refuse_gradients
from attn_shared.kv_cache import MLAAttentionSpec
from attn_shared.kv_write import concat_and_cache_mla as write_latents
from attn_shared.layer import Attention, StepPlan
from attn_shared.mla import MLAAttention

__all__ = ["attend", "attend_latents", "concat_and_cache_mla", "step"]

Plans = StepPlan | Mapping[int, StepPlan]
"""One plan for all layers, or a plan per handle where groups of layers differ."""

_CURRENT: ContextVar[Plans | None] = ContextVar("attn_step", default=None)


@contextmanager
def step(plans: Plans) -> Iterator[None]:
    """Set the plan of the steps that run inside.

    Args:
        plans: from `Attention.plan`; a mapping from `Attention.handle` where layers differ.
    """
    token = _CURRENT.set(plans)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def _current_plan(handle: int) -> StepPlan:
    plans = _CURRENT.get()
    if isinstance(plans, StepPlan):
        return plans
    if plans is None or handle not in plans:
        raise InvalidInputError.for_argument(
            "the step's plan",
            "not set" if plans is None else f"set for handles {sorted(plans)}, not {handle}",
            "set around the call",
            hint="run the model inside `with attn_shared.ops.step(plan):`.",
        )
    return plans[handle]


@torch.library.custom_op("attn::forward", mutates_args=("kv_cache", "output"))
def _forward_op(
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    kv_cache: torch.Tensor,
    output: torch.Tensor,
    handle: int,
) -> None:
    layer_of(handle).forward(query, key, value, kv_cache, _current_plan(handle), output)


@_forward_op.register_fake
def _forward_fake(
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    kv_cache: torch.Tensor,
    output: torch.Tensor,
    handle: int,
) -> None:
    """Nothing to infer: the call returns nothing and mutates what it is given."""


def attend(
    layer: Attention,
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    kv_cache: torch.Tensor,
) -> torch.Tensor:
    """Run a layer inside or outside a compiled graph; the plan comes from `step`.

    Args:
        layer: the layer.
        query: (T, Hq, D).
        key: (T, Hkv, D), or None.
        value: (T, Hkv, Dv), or None.
        kv_cache: the layer's cache, written in place.

    Returns:
        (T, Hq, Dv).

    Raises:
        UnsupportedOptionError: a gradient is asked for.
    """
    # Here and not in the operator alone: a compiled graph calls that with gradients off.
    refuse_gradients(layer, query=query, key=key, value=value, kv_cache=kv_cache)
    output = query.new_empty((*query.shape[:-1], layer.request.value_size))
    _forward_op(query, key, value, kv_cache, output, layer.handle)
    return output


@torch.library.custom_op("attn::mla_forward", mutates_args=("kv_cache", "output"))
def _mla_forward_op(
    query: torch.Tensor,
    latent: torch.Tensor,
    rope: torch.Tensor,
    kv_cache: torch.Tensor,
    output: torch.Tensor,
    handle: int,
) -> None:
    layer_of(handle).forward(query, latent, rope, kv_cache, _current_plan(handle), output)


@_mla_forward_op.register_fake
def _mla_forward_fake(
    query: torch.Tensor,
    latent: torch.Tensor,
    rope: torch.Tensor,
    kv_cache: torch.Tensor,
    output: torch.Tensor,
    handle: int,
) -> None:
    """Nothing to infer: the call returns nothing and mutates what it is given."""


def attend_latents(
    layer: MLAAttention,
    query: torch.Tensor,
    latent: torch.Tensor,
    rope: torch.Tensor,
    kv_cache: torch.Tensor,
) -> torch.Tensor:
    """Run a layer of latent attention inside or outside a compiled graph, as `attend`.

    Args:
        layer: the layer, with its projection.
        query: (T, H, qk_nope_head_dim + qk_rope_head_dim).
        latent: (T, kv_lora_rank).
        rope: (T, qk_rope_head_dim).
        kv_cache: the layer's cache, written in place.

    Returns:
        (T, H, v_head_dim).

    Raises:
        UnsupportedOptionError: a gradient is asked for.
    """
    refuse_gradients(layer, query=query, latent=latent, rope=rope, kv_cache=kv_cache)
    output = query.new_empty((*query.shape[:-1], layer.output_size))
    _mla_forward_op(query, latent, rope, kv_cache, output, layer.handle)
    return output


@torch.library.custom_op("attn::concat_and_cache_mla", mutates_args=("kv_cache",))
def concat_and_cache_mla(
    latent: torch.Tensor,
    rope: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    scale: torch.Tensor | None = None,
) -> None:
    """Write latents and rope parts as entries of a cache.

    Args:
        latent: (T, kv_lora_rank).
        rope: (T, qk_rope_head_dim).
        kv_cache: (num_blocks, block_size, kv_lora_rank + qk_rope_head_dim), of a floating or fp8
            dtype, written in place.
        slot_mapping: (T,) int64; -1 is not written.
        scale: (1,) float32 of an fp8 cache: stored = entry / scale; None: 1.

    Raises:
        InvalidInputError: a shape, dtype, device or scale does not fit.
    """
    if kv_cache.ndim != 3 or latent.ndim != 2:
        raise InvalidInputError.for_argument(
            "shapes of kv_cache and latent",
            f"{tuple(kv_cache.shape)} and {tuple(latent.shape)}",
            "(num_blocks, block_size, entry) and (T, kv_lora_rank)",
        )
    spec = MLAAttentionSpec(
        block_size=kv_cache.shape[1],
        head_size=kv_cache.shape[2],
        kv_lora_rank=latent.shape[1],
        dtype=kv_cache.dtype,
        kv_cache_dtype=_FORMATS.get(kv_cache.dtype) or dtype_name(kv_cache.dtype),
    )
    factor: float | torch.Tensor = 1.0 if scale is None else scale
    write_latents(kv_cache, spec, latent, rope, slot_mapping, scale=factor)


@concat_and_cache_mla.register_fake
def _concat_and_cache_mla_fake(
    latent: torch.Tensor,
    rope: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    scale: torch.Tensor | None = None,
) -> None:
    """Nothing to infer: the call returns nothing and mutates the cache."""


_FORMATS = {
    torch.float8_e4m3fn: "fp8_e4m3",
    torch.float8_e4m3fnuz: "fp8_e4m3",
    torch.float8_e5m2: "fp8_e5m2",
}
