"""Attention over keys and values that a model hands over whole, padded and contiguous.

This is what transformers' own caches do at every call. The causal case copies the real keys into
scratch blocks per layer and step: right with every backend and every such cache (reordered,
cropped, preallocated), at the price of reading and writing the whole past once more per token.
`PagedCache` keeps the blocks instead. Bidirectional attention needs no blocks and no copy.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from attn_shared.errors import InvalidInputError, UnsupportedOptionError
from attn_shared.kv_cache import AttentionSpec
from attn_shared.kv_write import slot_mapping_for, write_kv
from attn_shared.layer import Attention, StepPlan
from attn_shared.metadata import CommonAttentionMetadata
from attn_transformers.layers import LayerKey
from attn_transformers.masks import StepMask
from attn_transformers.tokens import Requests, Tokens, refuse_gap

__all__ = ["attend_cache_free", "attend_over_scratch"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Scratch:
    """Blocks for one layer's keys at a time, and the step's plan over them."""

    requests: Requests
    keys: Tokens
    plan: StepPlan
    blocks: torch.Tensor
    slots: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _FreeCall:
    """Which queries and keys are attended without a cache, and the step's plan."""

    queries: Tokens
    keys: Tokens
    plan: StepPlan


def attend_over_scratch(
    attention: Attention,
    layer_key: LayerKey,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    step: StepMask | None,
) -> torch.Tensor:
    """Attend causally through scratch blocks.

    Args:
        attention: the layer.
        layer_key: its kind.
        query: (B, Hq, Tq, D), the last tokens of each row.
        key: (B, Hkv, Tk, D).
        value: (B, Hkv, Tk, Dv).
        step: the pass's rules; None: no padding.

    Returns:
        (B, Tq, Hq, Dv); padding gets zeros, except the last place of a row.

    Raises:
        InvalidInputError: queries that are not the last keys' tokens.
        UnsupportedOptionError: a window over padding between real tokens.
    """
    scratch = _once_per_step(
        step, layer_key, lambda: _scratch(attention, layer_key, query, key, step)
    )
    queries = scratch.requests.queries
    output = query.new_zeros((queries.count, query.shape[1], value.shape[3]))
    if queries.count:
        keys, values = scratch.keys.gather(key), scratch.keys.gather(value)
        write_kv(scratch.blocks, _spec_of(attention), keys, values, scratch.slots)
        states = queries.gather(query), None, None
        attention.forward(*states, scratch.blocks, scratch.plan, output)
    return queries.scatter(output)


def attend_cache_free(
    attention: Attention,
    layer_key: LayerKey,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    step: StepMask | None,
) -> torch.Tensor:
    """Attend to all real keys of a row, or to those in a window to both sides.

    The arguments are those of `attend_over_scratch`. The padding mask speaks of keys: queries may
    be another sequence's (cross-attention), so that all are answered; only with a window, which
    self-attention alone has, padding gets zeros.
    """
    call = _once_per_step(
        step, layer_key, lambda: _free_call(attention, layer_key, query, key, step)
    )
    output = query.new_zeros((call.queries.count, query.shape[1], value.shape[3]))
    if call.queries.count:
        states = call.queries.gather(query), call.keys.gather(key), call.keys.gather(value)
        attention.forward(*states, None, call.plan, output)
    return call.queries.scatter(output)


def _once_per_step(step: StepMask | None, key: Hashable, make: Callable[[], T]) -> T:
    if step is None:
        return make()
    if key not in step.memo:
        step.memo[key] = make()
    made: T = step.memo[key]
    return made


def _scratch(
    attention: Attention,
    layer_key: LayerKey,
    query: torch.Tensor,
    key: torch.Tensor,
    step: StepMask | None,
) -> _Scratch:
    """Lay the rows out in blocks of their own, one row after another."""
    key_len = _check_causal(query, key, step)
    requests, keys = _causal_requests(query, key_len, layer_key, step)
    spec, batch_size = _spec_of(attention), query.shape[0]
    per_row = spec.num_blocks_for(key_len)
    table = torch.arange(batch_size * per_row, dtype=torch.int32).view(batch_size, per_row)
    lens = torch.full((batch_size,), key_len, dtype=torch.int32)
    if step is not None and step.is_real is not None:
        lens = step.is_real.sum(1, dtype=torch.int32)
    slots = slot_mapping_for(table, starts_of(lens), lens, spec.block_size)
    common = CommonAttentionMetadata.from_lengths(
        query_lens=requests.query_lens,
        seq_lens=requests.seq_lens,
        block_table=table[list(requests.rows)],
        device=attention.device,
    )
    return _Scratch(
        requests=requests,
        keys=keys,
        plan=attention.plan(common, num_blocks=table.numel()),
        blocks=attention.allocate(table.numel()),
        slots=slots.to(attention.device),
    )


def _check_causal(query: torch.Tensor, key: torch.Tensor, step: StepMask | None) -> int:
    """Return how many keys of each row exist; the queries must be the last of their tokens."""
    query_len, key_len = query.shape[2], key.shape[2]
    if step is None:
        if query_len not in (1, key_len):
            raise InvalidInputError.for_argument(
                "query length without a mask",
                query_len,
                f"1 or {key_len}, the keys: which keys the others see is not known",
                hint="pass the model an attention_mask, or a cache.",
            )
        return key_len
    if step.query_start + query_len != step.key_start + step.key_len:
        raise InvalidInputError.for_argument(
            "places of the queries",
            f"{step.query_start} to {step.query_start + query_len}",
            f"the last before {step.key_start + step.key_len}, where the keys end",
        )
    return step.key_len


def _causal_requests(
    query: torch.Tensor, key_len: int, layer_key: LayerKey, step: StepMask | None
) -> tuple[Requests, Tokens]:
    batch_size, query_len = query.shape[0], query.shape[2]
    if step is None or step.is_real is None:
        requests = Requests.unpadded(batch_size, query_len, key_len)
        return requests, Tokens(batch_size=batch_size, width=key_len)
    if step.has_gap:
        refuse_gap(layer_key.window, step.key_start + key_len)
    requests = Requests.padded(step.is_real, query_len, layer_key.window, query.device)
    return requests, Tokens.where(step.is_real, query.device)


def _free_call(
    attention: Attention,
    layer_key: LayerKey,
    query: torch.Tensor,
    key: torch.Tensor,
    step: StepMask | None,
) -> _FreeCall:
    queries = Tokens(batch_size=query.shape[0], width=query.shape[2])
    keys = Tokens(batch_size=key.shape[0], width=key.shape[2])
    query_lens = key_lens = [keys.width] * keys.batch_size
    if step is not None and step.is_real is not None:
        keys = Tokens.where(step.is_real, query.device)
        query_lens = key_lens = step.is_real.sum(1).tolist()
    if layer_key.window == (None, None):
        query_lens = [queries.width] * queries.batch_size
    elif queries.width != keys.width:
        raise InvalidInputError.for_argument(
            "queries per row with a two-sided window", queries.width, f"{keys.width}, the keys"
        )
    else:
        queries = keys
        if step is not None and step.has_gap:
            refuse_gap(layer_key.window, step.key_len)
    return _FreeCall(queries=queries, keys=keys, plan=_free_plan(attention, query_lens, key_lens))


def _free_plan(attention: Attention, query_lens: list[int], key_lens: list[int]) -> StepPlan:
    options: dict[str, Any] = {}
    if key_lens != query_lens:
        starts = starts_of(torch.tensor(key_lens, dtype=torch.int32))
        options = {"key_start_loc": starts.to(attention.device), "key_start_loc_cpu": starts}
    common = CommonAttentionMetadata.from_lengths(
        query_lens=query_lens,
        seq_lens=key_lens,
        device=attention.device,
        causal=False,
        **options,
    )
    return attention.plan(common)


def starts_of(lens: torch.Tensor) -> torch.Tensor:
    """Return the prefix sums (B + 1,) int32 of lengths (B,)."""
    starts = torch.zeros(len(lens) + 1, dtype=torch.int32)
    starts[1:] = lens.cumsum(0)
    return starts


def _spec_of(attention: Attention) -> AttentionSpec:
    spec = attention.kv_cache_spec
    if not isinstance(spec, AttentionSpec):
        raise UnsupportedOptionError(f"{attention.selection.chosen} has no cache of keys.")
    return spec
