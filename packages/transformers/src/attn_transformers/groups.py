"""The layers of a model that are alike, over blocks of their own: one block table for all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from attn_shared.errors import InvalidInputError, UnsupportedOptionError
from attn_shared.kv_cache import AttentionSpec, MLAAttentionSpec
from attn_shared.kv_write import PAD_SLOT_ID, slot_mapping_for
from attn_shared.layer import Attention
from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.mla import MLAAttention
from attn_transformers.blocks import BlockPool, BlockTables, Copies
from attn_transformers.layers import LayerKey
from attn_transformers.masks import StepMask
from attn_transformers.tokens import Requests, has_gap, refuse_gap
from attn_transformers.turns import Turn
from attn_transformers.zero_pages import ZeroPages

__all__ = ["LayerGroup"]

_FIRST_TOKENS = 512  # that the blocks of a new pool hold
_FEW_TOKENS = 64  # of a step, whose slots are counted one by one


class LayerGroup:
    """Block tables, pool and one cache tensor per layer.

    Attributes:
        key: what the layers have in common.
        width: of an output head.
        selection: which backend runs them, and why.
        spec: format of the blocks.
        num_places: places of each row that were fed so far, padding included.
        pool: the group's blocks.
        caches: layer index -> cache tensor.
        has_zero_pages: new memory holds zeros without being touched.
        turn_now: the latest pass, while rows are as it left them.
    """

    def __init__(
        self, key: LayerKey, attention: Attention | MLAAttention, max_blocks: int | None
    ) -> None:
        """Start empty.

        Raises:
            UnsupportedOptionError: the backend keeps no paged cache of keys and values.
        """
        spec = attention.kv_cache_spec
        if not isinstance(spec, AttentionSpec | MLAAttentionSpec):
            raise UnsupportedOptionError(f"{attention.selection.chosen} has no paged cache.")
        self.key = key
        self.width = key.head_size_v if key.mla is None else key.mla.v_head_dim
        self.selection = attention.selection
        self.spec = spec
        self.num_places = 0
        self.has_zero_pages = key.device.type == "cpu"
        self.pool = BlockPool(max_blocks, first_blocks=spec.num_blocks_for(_FIRST_TOKENS))
        self.caches: dict[int, torch.Tensor] = {}
        self._num_clean: dict[int, int] = {}  # of each cache, its first blocks without garbage
        self._pages: ZeroPages | None = None
        self._tables: BlockTables | None = None
        self._padding: torch.Tensor | None = None  # (B, num_places) bool, True for real; or none
        self.turn_now: Turn | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave the pass out of copies: it belongs to the backend, and ends with it."""
        return self.__dict__ | {"turn_now": None}

    def turn(
        self,
        attention: Attention | MLAAttention,
        step: StepMask | None,
        batch_size: int,
        start: int,
        count: int,
        *,
        keeps_past: bool,
    ) -> Turn:
        """Return the pass that feeds places start to start + count, begun by its first layer.

        Args:
            attention: a layer of the group.
            step: the pass's rules; None: no padding.
            batch_size: rows.
            start: places fed before.
            count: places fed now.
            keeps_past: keep blocks that have left the window, since places may be cropped.

        Raises:
            InvalidInputError: rows, places or padding do not continue what was fed before.
        """
        turn = self.turn_now
        if turn is not None and (turn.start, turn.stop) == (start, start + count):
            return turn
        if start != self.num_places:
            raise InvalidInputError.for_argument(
                "tokens in the cache",
                start,
                f"{self.num_places}, what the other layers of this kind have seen",
                hint="call PagedCache.reset() after a forward pass that failed.",
            )
        tables = self._tables_of(batch_size)
        is_real = self._padding_of(step, batch_size, start + count)
        if not keeps_past and self.key.window[0] is not None:
            tables.leave([length - self.key.window[0] for length in tables.lengths])
        fed = [count] * batch_size
        if is_real is not None:
            fed = is_real[:, start:].sum(1).tolist()
        tables.append(fed)
        self._zero_reused()
        self._padding, self.num_places = is_real, start + count
        self.turn_now = self._plan(attention, tables, count, writes=True)
        return self.turn_now

    def reread(
        self, attention: Attention | MLAAttention, step: StepMask | None, count: int
    ) -> Turn:
        """Return a pass of the last `count` places as queries, whose keys are written already.

        Args:
            attention: a layer of the group.
            step: the rules of these queries.
            count: queries per row.

        Raises:
            InvalidInputError: nothing was fed yet, or less.
        """
        if self._tables is None or not 0 < count <= self.num_places:
            raise InvalidInputError.for_argument(
                "queries per row", count, f"1 to {self.num_places}, the places in the cache"
            )
        memo: dict[Any, Any] = {} if step is None else step.memo
        if self.key not in memo:
            memo[self.key] = self._plan(attention, self._tables, count, writes=False)
        turn: Turn = memo[self.key]
        return turn

    def _tables_of(self, batch_size: int) -> BlockTables:
        if self._tables is None or self.num_places == 0:
            self._tables = BlockTables(batch_size, self.spec.block_size, self.pool)
        if len(self._tables) != batch_size:
            raise InvalidInputError.for_argument(
                "batch size", batch_size, f"{len(self._tables)}, the rows of this PagedCache"
            )
        return self._tables

    def _padding_of(self, step: StepMask | None, batch_size: int, stop: int) -> torch.Tensor | None:
        """Return which of the first `stop` places are real; the past must be what it was."""
        now = None if step is None else step.is_real
        if step is not None and (step.key_start, step.key_len) != (0, stop):
            raise InvalidInputError.for_argument(
                "places of the mask", f"{step.key_start} to {step.key_len}", f"0 to {stop}"
            )
        if now is None and self._padding is None:
            return None
        full = torch.ones((batch_size, stop), dtype=torch.bool) if now is None else now
        past = full[:, : self.num_places]
        before = torch.ones_like(past) if self._padding is None else self._padding
        if not torch.equal(past, before):
            raise InvalidInputError.for_argument(
                "attention_mask",
                "other in its past than when those tokens were fed",
                "the earlier mask with new columns on its right",
            )
        if has_gap(full):
            refuse_gap(self.key.window, stop)
        return full

    def _plan(
        self, attention: Attention | MLAAttention, tables: BlockTables, count: int, *, writes: bool
    ) -> Turn:
        """Plan the last `count` places as queries; `writes`: their keys are new."""
        requests = Requests.unpadded(len(tables), count, self.num_places)
        if self._padding is not None:
            requests = Requests.padded(self._padding, count, self.key.window, attention.device)
        plan = None
        if requests.rows:
            table = tables.tensor(requests.rows)
            slots = self._slots(tables, table, requests).to(attention.device) if writes else None
            common = CommonAttentionMetadata.from_lengths(
                query_lens=requests.query_lens,
                seq_lens=requests.seq_lens,
                block_table=table,
                slot_mapping=slots,
                device=attention.device,
                causal=self.key.is_causal,
            )
            plan = attention.plan(common, num_blocks=self.pool.capacity)
        return Turn(
            start=self.num_places - count,
            stop=self.num_places,
            queries=requests.queries,
            plan=plan,
        )

    def _slots(self, tables: BlockTables, table: torch.Tensor, requests: Requests) -> torch.Tensor:
        """Return the slot of each query's key, (T,) int64 on the host; padding is not written.

        Args:
            tables: the rows'.
            table: (B, M), those of the requests.
            requests: whose last `num_unwritten` queries are padding.
        """
        if sum(requests.query_lens) <= _FEW_TOKENS:
            return _few_slots(tables, requests)
        lens = torch.tensor(requests.seq_lens, dtype=torch.int32)
        starts = torch.zeros(len(lens) + 1, dtype=torch.int32)
        starts[1:] = torch.tensor(requests.query_lens).cumsum(0)
        slots = slot_mapping_for(table, starts, lens, self.spec.block_size)
        slots[len(slots) - requests.num_unwritten :] = PAD_SLOT_ID
        return slots

    def cache_of(self, layer: int) -> torch.Tensor:
        """Return the layer's cache tensor, with every block that the pool has given."""
        if self._num_clean.get(layer, 0) < self.pool.num_touched:
            self.caches[layer] = self._grown(layer)
            self._num_clean[layer] = self.pool.num_touched
        return self.caches[layer]

    def _grown(self, layer: int) -> torch.Tensor:
        """Make room for all blocks, and see that those which are new hold zeros.

        The others stay untouched: on a host the first touch of a page costs more than its use.
        """
        cache, num_clean = self.caches.get(layer), self._num_clean.get(layer, 0)
        if cache is None or len(cache) < self.pool.capacity:
            with torch.inference_mode(mode=False):  # else later passes could not write outside it
                grown = self._allocated()
            if cache is not None:
                grown[:num_clean] = cache[:num_clean]
            cache = grown
        if not self.has_zero_pages:
            cache[num_clean : self.pool.num_touched].zero_()
        return cache

    def _allocated(self) -> torch.Tensor:
        capacity = self.pool.capacity
        if self.has_zero_pages:
            if self._pages is None or self._pages.num_blocks != capacity:
                self._pages = ZeroPages(self.spec, capacity)
            return self._pages.allocate()
        return self.spec.allocate(capacity, self.key.device, is_zeroed=False)

    @property
    def num_bytes(self) -> int:
        """Bytes of the cache tensors."""
        return sum(len(cache) * self.spec.page_size_bytes for cache in self.caches.values())

    @property
    def peak_used_bytes(self) -> int:
        """Bytes of the most blocks that were held at one time, over all layers."""
        return self.pool.peak_used * self.spec.page_size_bytes * len(self.caches)

    def lost_tokens(self, places: int) -> list[int]:
        """Return the real tokens of each row among the last `places`.

        Raises:
            UnsupportedOptionError: what a window would then show was given back.
        """
        if self._tables is None:
            return []
        counts = [places] * len(self._tables)
        if self._padding is not None and places:
            counts = self._padding[:, -places:].sum(1).tolist()
        if not self._tables.can_shorten(counts, self.key.window[0]):
            raise UnsupportedOptionError(
                f"crop by {places}: what the window of {self.key.window} would show again was "
                "given back.",
                hint="call cache.activate_past_recording() before the tokens are fed.",
            )
        return counts

    def crop(self, places: int) -> None:
        """Forget the last `places` of every row."""
        counts = self.lost_tokens(places)
        self.turn_now = None
        if self._tables is not None and places:
            self._copy(self._tables.shorten(counts))
            self._zero_ends(self._tables)
            self.num_places -= places
            if self._padding is not None:
                self._padding = self._padding[:, : self.num_places]

    def select(self, rows: Sequence[int]) -> None:
        """Make row i what row rows[i] was: beam search, and repeating or choosing rows."""
        self.turn_now = None
        if self._tables is None:
            return
        self._copy(self._tables.select(rows))
        if self._padding is not None:
            self._padding = self._padding[list(rows)]

    def clear(self) -> None:
        """Forget everything; the tensors stay, zeroed."""
        if self._tables is not None:
            self._tables.clear()
        self._tables = self._padding = self.turn_now = None
        self.num_places = 0
        for layer, cache in self.caches.items():
            cache[: self._num_clean[layer]].zero_()

    @property
    def batch_size(self) -> int | None:
        """Rows, or None before the first pass."""
        return None if self._tables is None else len(self._tables)

    def _copy(self, copies: Copies) -> None:
        """Copy blocks in every layer."""
        self._zero_reused()  # of which some are written here
        if not copies:
            return
        sources, targets = (
            torch.tensor(ids, device=self.key.device) for ids in zip(*copies, strict=True)
        )
        for layer in self.caches:
            cache = self.cache_of(layer)
            cache[targets] = cache[sources]

    def _zero_reused(self) -> None:
        """Zero the blocks that were somebody's before: backends may read tails, where NaN spreads.

        A tail is what a block has past its row's tokens; the contract wants any finite value there.
        """
        reused, self.pool.reused = self.pool.reused, []
        for cache in self.caches.values():
            for block in reused:
                if block < len(cache):  # else it is new to this layer
                    cache[block].zero_()

    def _zero_ends(self, tables: BlockTables) -> None:
        """Zero what rows have lost in their last blocks."""
        is_one = isinstance(self.spec, MLAAttentionSpec) or self.spec.is_packed
        slot_dim = 0 if is_one else 1  # of a block: keys and values in one entry, or one by one
        for block, count in tables.open_ends():
            for cache in self.caches.values():
                if block < len(cache):
                    cache[block].narrow(slot_dim, count, self.spec.block_size - count).zero_()


def _few_slots(tables: BlockTables, requests: Requests) -> torch.Tensor:
    """Return slots counted one by one: an op of torch takes as long as dozens of tokens."""
    slots: list[int] = []
    for row, count, stop in zip(requests.rows, requests.query_lens, requests.seq_lens, strict=True):
        slots += tables.slots(row, stop - count, stop)
    for unwritten in range(len(slots) - requests.num_unwritten, len(slots)):
        slots[unwritten] = PAD_SLOT_ID
    return torch.tensor(slots, dtype=torch.int64)
