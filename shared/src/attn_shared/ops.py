"""The operator `attn::forward`, through which a compiled graph calls a layer.

    with attn_shared.ops.step(plan):
        output = compiled_model(hidden_states)

Inside the graph, `attend(layer, query, key, value, kv_cache)` becomes one call of
`attn::forward(query, key, value, kv_cache, output, handle)`, which mutates kv_cache and output.
`handle` is the layer's number in the process's table; the step's plan is set outside the graph.
That table and that plan are the one ambient state of attn, and only this operator reads them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from attn_shared.errors import InvalidInputError
from attn_shared.layer import Attention, StepPlan, layer_of

__all__ = ["attend", "step"]

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
    """
    output = query.new_empty((*query.shape[:-1], layer.request.value_size))
    _forward_op(query, key, value, kv_cache, output, layer.handle)
    return output
