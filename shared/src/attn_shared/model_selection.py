"""One selection for a whole model: a backend for each group of layers, one block size for all.

For instance:

    model = model_layers(load_config("config.json"), tp_size=4)
    print(select_model(model, DEFAULT_SELECTOR.resolve).explain())
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import lcm
from typing import Any

import torch

from attn_shared.dtypes import KVCacheLayout, dtype_name
from attn_shared.errors import AttnError, NoBackendError
from attn_shared.kv_cache import (
    ChunkedLocalAttentionSpec,
    EncoderOnlyAttentionSpec,
    KVCacheSpec,
    SlidingWindowSpec,
    spec_for,
)
from attn_shared.mla_prefill import prefill_request
from attn_shared.model_config import LayerGroup, ModelLayers
from attn_shared.paged_spec import PagedSpec
from attn_shared.request import AttentionRequest, AttentionType
from attn_shared.selection import Selection

__all__ = ["GroupSelection", "ModelSelection", "Resolve", "select_model", "select_prefill"]

Resolve = Callable[[AttentionRequest], Selection]
"""How one request is answered: `Selector.resolve` with a device and a policy bound."""

_STATE_BLOCK = 16  # tokens per block where a model has no attention cache to say


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSelection:
    """What one group of layers got.

    Attributes:
        group: the layers.
        selection: the answer to their request; None for a recurrent group.
        spec: what one of the layers keeps; None where nothing is kept.
        prefill: what prefills latent attention; None for ordinary and sparse layers, and where
            nobody was asked.
    """

    group: LayerGroup
    selection: Selection | None
    spec: KVCacheSpec | None
    prefill: Selection | None = None

    @property
    def num_shards(self) -> int:
        """Ranks that a sequence's keys lie on: decode context parallelism deals them out."""
        return 1 if self.group.request is None else self.group.request.dcp_size

    @property
    def cache_bytes_per_token(self) -> int:
        """Bytes that all layers of the group add per token of a sequence, on one rank.

        A rank among several that share the sequence keeps its share of them.
        """
        if not isinstance(self.spec, PagedSpec):
            return 0
        whole = self.spec.page_size_bytes // self.spec.block_size * self.group.num_caches
        return -(-whole // self.num_shards)

    @property
    def state_bytes_per_sequence(self) -> int:
        """Bytes of the recurrent states of all layers of the group, for one sequence."""
        return 0 if self.group.state is None else self.group.state.num_bytes * self.group.num_caches

    @property
    def kept_tokens(self) -> int | None:
        """Tokens that a sequence keeps at most; None: all of them."""
        if isinstance(self.spec, SlidingWindowSpec):
            return self.spec.window_left + 1
        if isinstance(self.spec, ChunkedLocalAttentionSpec):
            return self.spec.chunk_size
        return None

    def bytes_at(self, num_tokens: int) -> int:
        """Return what a sequence of so many tokens keeps, in whole blocks, on one rank."""
        if not isinstance(self.spec, PagedSpec):
            return self.state_bytes_per_sequence
        kept = num_tokens if self.kept_tokens is None else min(num_tokens, self.kept_tokens)
        blocks = self.spec.num_blocks_for(-(-kept // self.num_shards))
        return blocks * self.spec.page_size_bytes * self.group.num_caches

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-safe values."""
        request, state = self.group.request, self.group.state
        return {
            "name": self.group.name,
            "layers": list(self.group.layers),
            "sharing_layers": list(self.group.sharing_layers),
            "request": None if request is None else request.to_dict(),
            "state": None if state is None else state.to_dict(),
            "chosen": None if self.selection is None else self.selection.chosen,
            "selection": None if self.selection is None else self.selection.to_dict(),
            "prefill": None if self.prefill is None else self.prefill.chosen,
            "spec": _spec_record(self.spec),
            "kept_tokens": self.kept_tokens,
            "cache_bytes_per_token": self.cache_bytes_per_token,
            "state_bytes_per_sequence": self.state_bytes_per_sequence,
        }


def _spec_record(spec: KVCacheSpec | None) -> dict[str, Any] | None:
    if spec is None:
        return None
    record: dict[str, Any] = {
        "kind": type(spec).__name__,
        "block_size": spec.block_size,
        "page_size_bytes": spec.page_size_bytes,
    }
    if isinstance(spec, PagedSpec):
        record |= {"dtype": dtype_name(spec.dtype), "shape": [-1, *spec.shape(1)[1:]]}
    return record


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSelection:
    """The answer to a whole model on one device.

    Attributes:
        model: what was asked.
        groups: what each group of layers got.
        block_size: tokens per block of every cache; None where nothing is cached.
        notes: what a reader must know beside the answers.
    """

    model: ModelLayers
    groups: tuple[GroupSelection, ...]
    block_size: int | None
    notes: tuple[str, ...]

    @property
    def backends(self) -> tuple[str, ...]:
        """The backends that were chosen, each once, in the order of the groups."""
        names = (group.selection.chosen for group in self.groups if group.selection is not None)
        return tuple(dict.fromkeys(str(name) for name in names))

    @property
    def cache_bytes_per_token(self) -> int:
        """Bytes per token of a short sequence, of all layers, on one rank."""
        return sum(group.cache_bytes_per_token for group in self.groups)

    @property
    def long_bytes_per_token(self) -> int:
        """Bytes per further token once every window and chunk is full."""
        lasting = (group for group in self.groups if group.kept_tokens is None)
        return sum(group.cache_bytes_per_token for group in lasting)

    @property
    def state_bytes_per_sequence(self) -> int:
        """Bytes of the recurrent states of one sequence, on one rank."""
        return sum(group.state_bytes_per_sequence for group in self.groups)

    def bytes_at(self, num_tokens: int) -> int:
        """Return what one sequence of so many tokens keeps, in whole blocks, on one rank."""
        return sum(group.bytes_at(num_tokens) for group in self.groups)

    def explain(self) -> str:
        """Return a line per group, and the notes."""
        head = (
            f"{self.model.model_type}, {self.model.tp_size} ranks: block_size={self.block_size}, "
            f"{self.cache_bytes_per_token} bytes per token"
        )
        lines = [f"{g.group.name} x{len(g.group.layers)}: {_answer(g)}" for g in self.groups]
        return "\n".join([head, *lines, *(f"note: {note}" for note in self.notes)])

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-safe values."""
        length = self.model.max_model_len
        return {
            "model": {
                "model_type": self.model.model_type,
                "tp_size": self.model.tp_size,
                "dtype": dtype_name(self.model.dtype),
                "max_model_len": length,
            },
            "backends": list(self.backends),
            "block_size": self.block_size,
            "groups": [group.to_dict() for group in self.groups],
            "cache_bytes_per_token": self.cache_bytes_per_token,
            "long_bytes_per_token": self.long_bytes_per_token,
            "state_bytes_per_sequence": self.state_bytes_per_sequence,
            "bytes_at_max_model_len": None if length is None else self.bytes_at(length),
            "notes": list(self.notes),
        }


def _answer(group: GroupSelection) -> str:
    if group.selection is None:
        return f"{group.state_bytes_per_sequence} bytes of state per sequence"
    return group.selection.one_line()


def select_model(
    model: ModelLayers, resolve: Resolve, resolve_prefill: Resolve | None = None
) -> ModelSelection:
    """Choose a backend for each group of a model's layers, and one block size for all.

    Each group first gets the backend that it would get alone. If the block sizes that come with
    them differ, one is looked for that every one of these backends takes; failing that, the one
    that changes the fewest choices is taken, and a note says whose choice it changed.

    Args:
        model: the groups.
        resolve: answers one request, `Selector.resolve` for one.
        resolve_prefill: the same of kind "mla_prefill", for layers of latent attention; None: they
            are not asked about.

    Raises:
        NoBackendError: a group is served by no backend, or no block size fits all; names the
            group and holds the verdicts.
        AttnError: as `resolve`.
    """
    alone = [_resolve(group, resolve) for group in model.groups]
    sizes = [found.block_size for found in alone if found is not None and found.block_size]
    block_size, chosen, changed = _on_one_block_size(model, alone, sizes, resolve)
    groups = tuple(
        GroupSelection(
            group=group,
            selection=found,
            spec=_spec(group, found, block_size),
            prefill=_prefill(group, resolve_prefill),
        )
        for group, found in zip(model.groups, chosen, strict=True)
    )
    notes = (*model.notes, *changed, *_pool_notes(groups), *_device_notes(chosen))
    return ModelSelection(model=model, groups=groups, block_size=block_size, notes=notes)


def _resolve(
    group: LayerGroup, resolve: Resolve, block_size: int | None = None
) -> Selection | None:
    if group.request is None:
        return None
    request = group.request
    if block_size is not None and not request.is_cache_free:
        request = request.with_options(block_size=block_size)
    try:
        return resolve(request)
    except NoBackendError as error:
        words = f"layers of {group.name}: {error.message}"
        raise type(error)(words, selection=error.selection, hint=error.hint) from error


def select_prefill(request: AttentionRequest, resolve: Resolve) -> Selection | None:
    """Choose what prefills a layer of latents.

    None for ordinary and sparse layers, and over a cache that ranks share, where rows are decoded.

    Args:
        request: of the layer.
        resolve: answers a request of kind "mla_prefill".

    Raises:
        NoBackendError: nothing prefills it.
    """
    if not request.use_mla or request.use_sparse or request.dcp_size > 1:
        return None
    return resolve(prefill_request(request))


def _prefill(group: LayerGroup, resolve: Resolve | None) -> Selection | None:
    if resolve is None or group.request is None:
        return None
    return select_prefill(group.request, resolve)


def _on_one_block_size(
    model: ModelLayers, alone: list[Selection | None], sizes: list[int], resolve: Resolve
) -> tuple[int | None, list[Selection | None], list[str]]:
    """Return the block size, the selections with it, and a note per choice that it changed."""
    if len(set(sizes)) <= 1:
        return (sizes[0] if sizes else None), alone, []
    tried: list[tuple[int, list[Selection | None], list[str]]] = []
    refusal: AttnError | None = None
    for size in _sizes_to_try(sizes):
        try:
            chosen = [_resolve(group, resolve, size) for group in model.groups]
        except NoBackendError as error:
            refusal = refusal or error
            continue
        changed = list(_changes(model, alone, chosen, size))
        if not changed:
            return size, chosen, [_agreed(alone, size)]
        tried.append((size, chosen, changed))
    if not tried:
        raise _no_common_size(model, alone, refusal) from refusal
    return min(tried, key=lambda attempt: len(attempt[2]))


def _sizes_to_try(sizes: list[int]) -> list[int]:
    """Return the sizes that the groups got alone, the largest first, then their multiple."""
    return list(dict.fromkeys([*sorted(sizes, reverse=True), lcm(*sizes)]))


def _agreed(alone: list[Selection | None], size: int) -> str:
    wishes = {found.chosen: found.block_size for found in alone if found and found.block_size}
    words = ", ".join(f"{name} {wish}" for name, wish in wishes.items())
    return f"blocks of {size} tokens suit all caches; alone they would have: {words}"


def _changes(
    model: ModelLayers, alone: list[Selection | None], chosen: list[Selection | None], size: int
) -> Iterator[str]:
    for group, before, after in zip(model.groups, alone, chosen, strict=True):
        if before is not None and after is not None and before.chosen != after.chosen:
            yield (
                f"layers of {group.name} run on {after.chosen}: {before.chosen}, which they would "
                f"get alone, does not take the common block of {size} tokens"
            )


def _no_common_size(
    model: ModelLayers, alone: list[Selection | None], refusal: AttnError | None
) -> NoBackendError:
    wishes = (
        f"{group.name}: {found.chosen} with {found.block_size}"
        for group, found in zip(model.groups, alone, strict=True)
        if found is not None and found.block_size
    )
    return NoBackendError(
        f"no block size fits all groups of layers ({'; '.join(wishes)}).",
        selection=getattr(refusal, "selection", None),
        hint="name a block size, or a backend that serves every group.",
    )


def _spec(
    group: LayerGroup, selection: Selection | None, block_size: int | None
) -> KVCacheSpec | None:
    """Return what one layer of the group keeps; None for a cache-free one."""
    if group.state is not None:
        return group.state.spec(block_size or _STATE_BLOCK)
    if selection is None or selection.request.is_cache_free or selection.block_size is None:
        return None
    spec = spec_for(
        selection.request,
        block_size=selection.block_size,
        layout=selection.kv_layout or KVCacheLayout.NHD,
        fp8_e4m3_dtype=selection.device.fp8_dtype or torch.float8_e4m3fn,
    )
    return None if isinstance(spec, EncoderOnlyAttentionSpec) else spec


def _pool_notes(groups: tuple[GroupSelection, ...]) -> Iterator[str]:
    """Say what a pool of equal pages for caches and states would need, and what it cannot count."""
    states = [g.group.state.num_bytes for g in groups if g.group.state is not None]
    caches = [g.spec for g in groups if isinstance(g.spec, PagedSpec)]
    if states and caches:
        per_token = max(spec.page_size_bytes // spec.block_size for spec in caches)
        base = caches[0].block_size
        needed = -(-max(states) // per_token)
        yield (
            f"one pool of equal pages for caches and states needs blocks of "
            f"{-(-needed // base) * base} tokens: a state has {max(states)} bytes, a token of a "
            f"cache {per_token}"
        )
    types = {g.group.request.attn_type for g in groups if g.group.request is not None}
    if AttentionType.ENCODER_DECODER in types:
        yield "the cache of cross attention holds the encoder's tokens, not the decoder's"


def _device_notes(chosen: list[Selection | None]) -> Iterator[str]:
    for found in chosen:
        if found is not None:
            yield from found.notes()
            return
