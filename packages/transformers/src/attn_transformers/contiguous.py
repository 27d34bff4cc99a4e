"""Attention over keys and values that a model hands over whole, padded and contiguous.

This is what transformers' own caches do at every call. The causal case copies the real keys into
scratch blocks per layer and step: right with every backend and every such cache (reordered,
cropped, preallocated), at the price of reading and writing the whole past once more per token.
`PagedCache` keeps the blocks instead. Bidirectional attention needs no blocks and no copy.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch

from attn_shared.errors import InvalidInputError, UnsupportedOptionError
from attn_shared.kv_cache import AttentionSpec
from attn_shared.kv_write import slot_mapping_for, write_kv
from attn_shared.layer import Attention, StepPlan
from attn_shared.metadata import CommonAttentionMetadata
from attn_transformers.layers import LayerKey
from attn_transformers.masks import StepMask
from attn_transformers.tokens import Tokens, has_gap

__all__ = ["attend_cache_free", "attend_over_scratch"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Scratch:
    """Blocks for one layer's keys, and the step's plan over them."""

    plan: StepPlan
    blocks: torch.Tensor
    slots: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """Which of the handed-over tokens are real."""

    queries: Tokens
    keys: Tokens


def attend_over_scratch(
    attention: Attention,
    key_of_layer: LayerKey,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    step: StepMask | None,
) -> torch.Tensor:
    """Attend causally through scratch blocks.

    Args:
        attention: the layer.
        key_of_layer: its kind.
        query: (B, Hq, Tq, D), the last tokens of each row.
        key: (B, Hkv, Tk, D).
        value: (B, Hkv, Tk, Dv).
        step: the pass's rules; None: no padding.

    Returns:
        (B, Tq, Hq, Dv); padding gets zeros.

    Raises:
        InvalidInputError: queries that are not the last keys' tokens.
        UnsupportedOptionError: a window over padding between real tokens.
    """
    call = _remembered(step, ("call", query.device), lambda: _causal_call(query, key, step))
    output = query.new_zeros((call.queries.count, query.shape[1], value.shape[3]))
    if call.queries.count:
        _refuse_gaps(key_of_layer, step)
        scratch = _remembered(step, key_of_layer, lambda: _scratch(attention, call))
        spec = _spec_of(attention)
        keys, values = call.keys.gather(key), call.keys.gather(value)
        write_kv(scratch.blocks, spec, keys, values, scratch.slots)
        query_rows = call.queries.gather(query)
        attention.forward(query_rows, None, None, scratch.blocks, scratch.plan, output)
    return call.queries.scatter(output)


def _remembered(step: StepMask | None, key: Hashable, make: Any) -> Any:
    """Return what `make` returns, made once per step."""
    if step is None:
        return make()
    if key not in step.memo:
        step.memo[key] = make()
    return step.memo[key]


def _causal_call(query: torch.Tensor, key: torch.Tensor, step: StepMask | None) -> _Call:
    batch_size, query_len, key_len = query.shape[0], query.shape[2], key.shape[2]
    if step is None:
        if query_len not in (1, key_len):
            raise InvalidInputError.for_argument(
                "query length without a mask",
                query_len,
                f"1 or {key_len}, the keys: causality of the others is not known",
                hint="pass the model an attention_mask, or a cache.",
            )
        first = key_len - query_len
    else:
        first, key_len = step.query_start - step.key_start, step.key_len
    if first + query_len != key_len:
        raise InvalidInputError.for_argument(
            "queries", f"{first} to {first + query_len} of {key_len} keys", "the last keys' tokens"
        )
    if step is None or step.is_real is None:
        keys = Tokens.all_of(batch_size, key_len)
        return _Call(queries=Tokens.all_of(batch_size, query_len), keys=keys)
    return _Call(
        queries=Tokens.where(step.is_real[:, first:], query.device),
        keys=Tokens.where(step.is_real, query.device),
    )


def _refuse_gaps(key_of_layer: LayerKey, step: StepMask | None) -> None:
    """Refuse a window where counting real tokens differs from counting places."""
    if step is None or step.is_real is None or key_of_layer.window == (None, None):
        return
    left = key_of_layer.window[0]
    if has_gap(step.is_real) and (left is None or step.key_len > left + 1):
        raise UnsupportedOptionError(
            f"a sliding window of {key_of_layer.window} over a padding mask with padding between "
            "real tokens of a row.",
            hint="pad on the left.",
        )


def _spec_of(attention: Attention) -> AttentionSpec:
    spec = attention.kv_cache_spec
    if not isinstance(spec, AttentionSpec):
        raise UnsupportedOptionError(f"{attention.selection.chosen} has no cache of keys.")
    return spec


def _scratch(attention: Attention, call: _Call) -> _Scratch:
    """Lay the rows that have a query out in blocks of their own, one row after another."""
    spec = _spec_of(attention)
    per_row = spec.num_blocks_for(max(call.keys.lengths))
    batch_size = len(call.keys.lengths)
    table = torch.arange(batch_size * per_row, dtype=torch.int32).view(batch_size, per_row)
    lens = torch.tensor(call.keys.lengths, dtype=torch.int32)
    starts = torch.zeros(batch_size + 1, dtype=torch.int32)
    starts[1:] = lens.cumsum(0)
    slots = slot_mapping_for(table, starts, lens, spec.block_size)
    active = [row for row, length in enumerate(call.queries.lengths) if length]
    common = CommonAttentionMetadata.from_lengths(
        query_lens=[call.queries.lengths[row] for row in active],
        seq_lens=[call.keys.lengths[row] for row in active],
        block_table=table[active],
        device=attention.device,
    )
    blocks = attention.allocate(table.numel())
    return _Scratch(
        plan=attention.plan(common, num_blocks=table.numel()),
        blocks=blocks,
        slots=slots.to(attention.device),
    )


def attend_cache_free(
    attention: Attention,
    key_of_layer: LayerKey,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    step: StepMask | None,
) -> torch.Tensor:
    """Attend to all real keys of a row, or to those in a window to both sides.

    The arguments and the result are those of `attend_over_scratch`. The padding mask speaks of
    keys: queries may be another sequence's (cross-attention), so that all are answered; only with
    a window, which self-attention alone has, padding is left out.
    """
    call = _remembered(
        step,
        ("cache-free", query.device, key_of_layer.window),
        lambda: _free_call(query, key, key_of_layer, step),
    )
    output = query.new_zeros((call.queries.count, query.shape[1], value.shape[3]))
    if call.queries.count:
        _refuse_gaps(key_of_layer, step)
        plan = _remembered(step, key_of_layer, lambda: _free_plan(attention, call))
        states = call.queries.gather(query), call.keys.gather(key), call.keys.gather(value)
        attention.forward(*states, None, plan, output)
    return call.queries.scatter(output)


def _free_call(
    query: torch.Tensor, key: torch.Tensor, key_of_layer: LayerKey, step: StepMask | None
) -> _Call:
    batch_size, query_len, key_len = query.shape[0], query.shape[2], key.shape[2]
    is_real = None if step is None else step.is_real
    if is_real is None:
        keys = Tokens.all_of(batch_size, key_len)
    else:
        keys = Tokens.where(is_real, query.device)
    if key_of_layer.window == (None, None):
        return _Call(queries=Tokens.all_of(batch_size, query_len), keys=keys)
    if query_len != key_len:
        raise InvalidInputError.for_argument(
            "query length with a two-sided window", query_len, f"{key_len}, the keys"
        )
    return _Call(queries=keys, keys=keys)


def _free_plan(attention: Attention, call: _Call) -> StepPlan:
    options: dict[str, torch.Tensor] = {}
    if call.keys.lengths != call.queries.lengths:
        starts = torch.zeros(len(call.keys.lengths) + 1, dtype=torch.int32)
        starts[1:] = torch.tensor(call.keys.lengths, dtype=torch.int32).cumsum(0)
        options = {
            "key_start_loc": starts.to(attention.device),
            "key_start_loc_cpu": starts,
        }
    common = CommonAttentionMetadata.from_lengths(
        query_lens=call.queries.lengths,
        seq_lens=call.keys.lengths,
        device=attention.device,
        causal=False,
        **options,
    )
    return attention.plan(common)
