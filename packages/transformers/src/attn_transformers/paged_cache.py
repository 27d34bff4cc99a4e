"""A transformers cache whose keys and values lie in blocks.

transformers hands a step's keys and values to the cache, takes back what the attention function is
to see, and calls that function. `PagedCache.update` gives back the same new tensors, with a note
of the layer and place they belong to; the attention function finds the note and lets the cache
write them to blocks and attend there. The past is never gathered, repeated or concatenated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache

from attn_shared.argument_checks import require_count, require_kind, require_tensor
from attn_shared.dtypes import parse_kv_cache_dtype
from attn_shared.errors import InvalidInputError, UnsupportedOptionError
from attn_shared.layer import Attention
from attn_shared.mla import MLAAttention
from attn_shared.selection import Selection
from attn_transformers.groups import LayerGroup
from attn_transformers.layers import LayerKey
from attn_transformers.masks import StepMask
from attn_transformers.new_tokens import NewTokens
from attn_transformers.paged_layer import PagedLayer, layers_of
from attn_transformers.turns import Turn

__all__ = ["CacheUsage", "PagedCache"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheUsage:
    """Memory of a `PagedCache`.

    Attributes:
        allocated_bytes: bytes of its tensors.
        used_blocks: blocks that rows hold, over all kinds of layers.
        peak_used_blocks: the most that were held at one time.
        peak_used_bytes: their bytes in all layers.
        block_size: tokens per block, of the first kind of layers; None before the first pass.
    """

    allocated_bytes: int
    used_blocks: int
    peak_used_blocks: int
    peak_used_bytes: int
    block_size: int | None


class PagedCache(Cache):  # type: ignore[misc]
    """Keys and values of a model's layers in blocks, for attn_implementation="attn".

        cache = PagedCache()
        model.generate(**inputs, cache=cache)

    Rows take blocks as they grow and share those that they have in common: beams, repeated rows.
    Padding is never stored. Layers with a window give back the blocks that have left it. Models
    that alternate kinds of layers get a pool of blocks per kind.
    """

    def __init__(
        self,
        config: Any = None,
        *,
        block_size: int | None = None,
        kv_cache_dtype: str = "auto",
        max_blocks: int | None = None,
    ) -> None:
        """Start empty; everything else is known when the first layer attends.

        Args:
            config: the model's configuration; needed only by models that have layers with other
                state beside attention (convolutions, linear attention).
            block_size: tokens per block; None: the backend's choice.
            kv_cache_dtype: format of the blocks: "auto" is that of the model, and
                `attn_shared.dtypes.KV_CACHE_DTYPES` lists others.
            max_blocks: most blocks per kind of layers; None: as many as it takes.

        Raises:
            InvalidInputError: a number is no count, or `config` is no configuration.
            UnknownNameError: there is no such format.
            UnsupportedOptionError: the model has layers with a state that is not kept here.
        """
        for name, count in (("block_size", block_size), ("max_blocks", max_blocks)):
            if count is not None:
                require_count(name, count)
        if config is None:
            super().__init__(layer_class_to_replicate=PagedLayer)
        else:
            super().__init__(layers=layers_of(config))
        self.block_size = block_size
        self.kv_cache_dtype = parse_kv_cache_dtype(kv_cache_dtype)
        self.max_blocks = max_blocks
        self._groups: dict[LayerKey, LayerGroup] = {}
        self.group_of: dict[int, LayerGroup] = {}
        self._pending: NewTokens | str | None = None  # what was begun, until it is done

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Note where new keys (B, Hkv, T, D) and values (B, Hkv, T, Dv) belong.

        Returns:
            The same two tensors, for attn's attention function, which writes them.

        Raises:
            UnsupportedOptionError: another attention function got those of the layer before.
        """
        if self._pending is not None:
            self._refuse_pending()
        key_states, value_states = super().update(key_states, value_states, layer_idx)
        layer = self.layers[layer_idx]
        if isinstance(layer, PagedLayer):
            count = key_states.shape[-2]
            note = NewTokens(self, layer_idx, layer.num_places - count, count)
            note.attach(key_states, value_states)
            self._pending = note
        return key_states, value_states

    def attend(
        self,
        note: NewTokens,
        key_of_layer: LayerKey,
        attention: Attention | MLAAttention,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        step: StepMask | None,
    ) -> torch.Tensor:
        """Write a layer's new tokens and attend to all of its tokens.

        Args:
            note: what `update` noted; where its tokens are written already (a layer that shares
                another's), they are only read.
            key_of_layer: the layer's kind.
            attention: the layer.
            query: (B, Hq, T, D).
            key: (B, Hkv, T, D); of latent attention (B, 1, T, kv_lora_rank), the latents.
            value: (B, Hkv, T, Dv); of latent attention (B, 1, T, qk_rope_head_dim), rope parts.
            step: the pass's rules; None: no padding.

        Returns:
            (B, T, Hq, Dv); padding gets zeros, except the last place of a row.
        """
        group, turn = self._turn(note, key_of_layer, attention, query, step)
        return self.run(note, group, turn, attention, query, key, value)

    def _turn(
        self,
        note: NewTokens,
        key_of_layer: LayerKey,
        attention: Attention | MLAAttention,
        query: torch.Tensor,
        step: StepMask | None,
    ) -> tuple[LayerGroup, Turn]:
        """Return the layer's group, and the pass that the tokens belong to."""
        group = self._group(note.layer, key_of_layer, attention)
        if note.is_written and query.shape[2] != note.count:
            return group, group.reread(attention, step, query.shape[2])
        if query.shape[2] == note.count:
            keeps_past = self.layers[note.layer].record_past
            turn = group.turn(
                attention, step, query.shape[0], note.start, note.count, keeps_past=keeps_past
            )
            return group, turn
        raise InvalidInputError.for_argument(
            "queries per row", query.shape[2], f"{note.count}, the tokens put into the cache"
        )

    def run(
        self,
        note: NewTokens,
        group: LayerGroup,
        turn: Turn,
        attention: Attention | MLAAttention,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> torch.Tensor:
        """Write and attend as `attend` does, where group and pass are known.

        Args:
            note: as there, like all arguments that are not listed here.
            group: the layer's.
            turn: the group's pass that the tokens belong to.
            attention: as there.
            query: as there.
            key: as there.
            value: as there.
        """
        if turn.plan is None:  # every place is padding
            size = len(query), turn.queries.width, query.shape[1], group.width
            self._pending = None
            return query.new_zeros(size)
        cache = group.cache_of(note.layer)
        if isinstance(attention, MLAAttention):
            output = turn.run_latents(attention, turn.plan, cache, query, key, value, group.width)
        elif note.is_written:
            output = turn.run(attention, turn.plan, cache, query, None, None)
        else:
            output = turn.run(attention, turn.plan, cache, query, key, value)
        note.is_written = True
        self._pending = (
            None  # not before: places that a failed call left empty are not gone on with
        )
        return output

    def _group(self, layer: int, key: LayerKey, attention: Attention | MLAAttention) -> LayerGroup:
        group = self.group_of.get(layer)
        if group is None:
            if key not in self._groups:
                self._groups[key] = LayerGroup(key, attention, self.max_blocks)
            group = self.group_of[layer] = self._groups[key]
        if group.key != key:
            raise UnsupportedOptionError(
                f"layer {layer} of this PagedCache was {group.key} and now is {key}.",
                hint="use a PagedCache with one model and one attn_implementation.",
            )
        return group

    def _refuse_pending(self) -> None:
        if self._pending is None:
            return
        if isinstance(self._pending, str):
            raise UnsupportedOptionError(
                f"this PagedCache failed while it {self._pending}.", hint="call cache.reset()."
            )
        raise UnsupportedOptionError(
            f"keys of layer {self._pending.layer} were put into this PagedCache and never reached "
            "attn's attention function: the model runs another one, changes keys on the way, or "
            "failed before.",
            hint='load the model with attn_implementation="attn" after '
            "attn_transformers.register(); after a failed pass call cache.reset().",
        )

    def selections(self) -> tuple[Selection, ...]:
        """Return which backend runs each kind of layers, and why; empty before the first pass."""
        return tuple(group.selection for group in self._groups.values())

    def usage(self) -> CacheUsage:
        """Return how much memory it takes, and took at most."""
        groups = list(self._groups.values())
        return CacheUsage(
            allocated_bytes=sum(group.num_bytes for group in groups),
            used_blocks=sum(group.pool.num_used for group in groups),
            peak_used_blocks=sum(group.pool.peak_used for group in groups),
            peak_used_bytes=sum(group.peak_used_bytes for group in groups),
            block_size=groups[0].spec.block_size if groups else None,
        )

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Return the state of a convolution; only a cache made with the configuration has it."""
        self._refuse_state(layer_idx)
        state: torch.Tensor | None = super().get_conv_state(layer_idx, state_idx)
        return state

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Return a recurrent state; only a cache made with the configuration has it."""
        self._refuse_state(layer_idx)
        state: torch.Tensor | None = super().get_recurrent_state(layer_idx, state_idx)
        return state

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """Refuse: sparse attention over an indexer's selection is not served here."""
        raise UnsupportedOptionError(
            f"layer {layer_idx} keeps an indexer's keys, for which PagedCache has no place.",
            hint="let generate() make transformers' own cache.",
        )

    def _refuse_state(self, layer_idx: int) -> None:
        if layer_idx < len(self.layers) and not isinstance(self.layers[layer_idx], PagedLayer):
            return
        raise UnsupportedOptionError(
            f"layer {layer_idx} has a state beside attention, which this PagedCache knows nothing "
            "of.",
            hint="make it with PagedCache(model.config).",
        )

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Make row i what row beam_idx[i] was: (B,) integers.

        Raises:
            InvalidInputError: it is no tensor, or names a row that is not there.
        """
        self._select(self._rows_in("beam_idx", beam_idx))
        for layer in self._other_layers():
            layer.reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row; full blocks are shared, not copied.

        Raises:
            InvalidInputError: `repeats` is no count.
        """
        require_count("repeats", repeats)
        size = self._num_rows()
        self._select([row for row in range(size) for _ in range(repeats)])
        for layer in self._other_layers():
            layer.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep rows: (N,) integers or (B,) bool.

        Raises:
            InvalidInputError: it is no such tensor, or names a row that is not there.
        """
        self._select(self._rows_in("indices", indices))
        for layer in self._other_layers():
            layer.batch_select_indices(indices)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last -tokens_to_remove places of every row.

        Args:
            tokens_to_remove: 0 or negative, as transformers counts.

        Raises:
            InvalidInputError: a positive number, or more places than there are.
            UnsupportedOptionError: a window would show again what was given back.
        """
        require_kind("tokens_to_remove", tokens_to_remove, int)
        if not 0 <= -tokens_to_remove <= self.get_seq_length():
            raise InvalidInputError.for_argument(
                "tokens_to_remove", tokens_to_remove, f"{-self.get_seq_length()} to 0"
            )
        self._refuse_pending()
        for group in self._groups.values():
            group.lost_tokens(-tokens_to_remove)  # refuse before anything is changed
        self._pending = "was cropped"
        for group in self._groups.values():
            group.crop(-tokens_to_remove)
        for layer in self.layers:
            if isinstance(layer, PagedLayer):
                layer.num_places = max(0, layer.num_places + tokens_to_remove)
            else:
                layer.crop(tokens_to_remove)
        self._pending = None

    def reset(self) -> None:
        """Forget everything, also after a pass that failed; memory is kept for the next use."""
        self._pending = None
        for group in self._groups.values():
            group.clear()
        for layer in self.layers:
            if isinstance(layer, PagedLayer):
                layer.num_places = 0
            else:
                layer.reset()

    def _select(self, rows: Sequence[int]) -> None:
        self._refuse_pending()
        self._pending = "chose rows"
        for group in self._groups.values():
            group.select(rows)
        self._pending = None

    def _rows_in(self, name: str, rows: object) -> list[int]:
        """Return the rows that a tensor of places or of bools names."""
        require_tensor(name, rows)
        places = torch.arange(self._num_rows())
        try:
            return list(places[torch.as_tensor(rows).cpu()].tolist())
        except (IndexError, TypeError) as error:
            raise InvalidInputError.for_argument(
                name, rows, f"(N,) places below {len(places)}, or ({len(places)},) bool"
            ) from error

    def _num_rows(self) -> int:
        sizes = [group.batch_size for group in self._groups.values() if group.batch_size]
        return sizes[0] if sizes else 0

    def _other_layers(self) -> list[Any]:
        return [layer for layer in self.layers if not isinstance(layer, PagedLayer)]
