"""Runs the tiles of a plan for one layer: picks the path, cuts rows, masks, and writes results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_torch._cache_reader import KeysValues
from attn_torch._exact import ExactOptions, exact_attention
from attn_torch._fused import fused_attention
from attn_torch._plan import GroupTile, Plan, RequestTile
from attn_torch._spans import LOGITS_BYTES, Chunk, Cover, Span, row_chunks
from attn_torch._visibility import Visibility

__all__ = ["LayerCall"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerCall:
    """One layer's attention in one step.

    Attributes:
        query: (T, Hq, D).
        output: (T, Hq, Dv), written in place.
        lse: (Hq, T) float32, written in place, or None.
        read: returns the keys and values of a tile.
        num_kv_heads: Hkv.
        visibility: of the layer.
        options: of the layer, for the exact path.
        is_exact: the layer or the call needs the exact path.
        is_fused: the fast path never holds all logits.
        is_invariant: operands are copied, so that nothing depends on where in a batch they lie.
    """

    query: Tensor
    output: Tensor
    lse: Tensor | None
    read: Callable[[RequestTile | GroupTile], KeysValues]
    num_kv_heads: int
    visibility: Visibility
    options: ExactOptions
    is_exact: bool
    is_fused: bool
    is_invariant: bool

    def run(self, plan: Plan) -> None:
        """Write the output, and the LSE, of every row that belongs to a request."""
        for rows in plan.blind:
            self._blank(rows)
        for tile in plan.tiles:
            if isinstance(tile, RequestTile):
                self._run_request(tile)
            else:
                self._run_group(tile)

    def _blank(self, rows: slice) -> None:
        """Write what rows without a visible key get: output 0, and the sink alone as LSE."""
        self.output[rows].zero_()
        if self.lse is None:
            return
        sinks = self.options.sinks
        if sinks is None:
            self.lse[:, rows].fill_(-torch.inf)
        else:
            self.lse[:, rows].copy_(sinks.unsqueeze(1).expand(-1, rows.stop - rows.start))

    def _run_request(self, tile: RequestTile) -> None:
        span, count = tile.span, tile.count
        rows = slice(span.query_start, span.query_start + count * span.query_len)
        query = _by_request(self.query[rows], count)
        output = self._grouped_output(rows, count)
        lse = None if self.lse is None else self._grouped_lse(self.lse[:, rows], count)
        keys = self.read(tile)
        if self.is_invariant:
            # Kernels may choose by alignment, which depends on what lies before in the batch.
            query, keys = query.clone(), keys if tile.blocks is not None else _cloned(keys)
        for chunk in self._chunks(tile):
            own = slice(chunk.first_row, chunk.stop_row)
            seen = slice(chunk.first_key - tile.first_key, chunk.stop_key - tile.first_key)
            part = KeysValues(keys.key[:, seen], keys.value[:, seen])
            result, sums = self._attend_chunk(chunk, span, query[:, own], part)
            output[:, own].copy_(result)
            if lse is not None and sums is not None:
                lse[..., own].copy_(sums)

    def _chunks(self, tile: RequestTile) -> tuple[Chunk, ...]:
        if self.is_fused and not self.is_exact:
            return tile.chunks
        return row_chunks(tile.span, self.visibility, max_logits=self._max_logits // tile.count)

    @property
    def _max_logits(self) -> int:
        """Most rows * keys whose logits, of all heads, may exist at once."""
        return LOGITS_BYTES // (self.query.shape[1] * self.options.accumulate.itemsize)

    def _attend_chunk(
        self, chunk: Chunk, span: Span, query: Tensor, keys: KeysValues
    ) -> tuple[Tensor, Tensor | None]:
        """Return output (R, n, Hkv, G, Dv), and LSE (R, Hkv, G, n) from the exact path."""
        needs_distance = self.options.alibi_slopes is not None
        is_square = chunk.cover is Cover.SQUARE and not self._needs_exact(chunk)
        mask = distance = None
        if needs_distance or (chunk.cover is not Cover.FULL and not is_square):
            top, device = span.position + chunk.first_row, query.device
            rows = torch.arange(top, top + chunk.num_rows, device=device).unsqueeze(1)
            columns = torch.arange(chunk.first_key, chunk.stop_key, device=device).unsqueeze(0)
            if chunk.cover is not Cover.FULL:
                mask = self.visibility.mask(
                    rows, columns, is_causal=span.is_causal, ranges=span.ranges
                ).unsqueeze(0)
            if needs_distance:
                distance = (rows - columns).abs_().unsqueeze(0)
        if self._needs_exact(chunk):
            return exact_attention(*(query, *keys), self.options, mask=mask, distance=distance)
        scale = self.options.scale
        return (
            fused_attention(query, *keys, scale=scale, mask=mask, is_square_causal=is_square),
            None,
        )

    def _needs_exact(self, chunk: Chunk) -> bool:
        """Whether the exact path runs; it can cut a row's heads where one row is too much."""
        is_too_much = not self.is_fused and chunk.num_rows * chunk.num_keys > self._max_logits
        return self.is_exact or is_too_much

    def _run_group(self, tile: GroupTile) -> None:
        count = tile.blocks.shape[0]
        query = _by_request(self._rows_of(tile), count)
        keys = self.read(tile)
        if self.is_exact:
            slopes = self.options.alibi_slopes
            positions = tile.query_positions, tile.key_positions
            distance = None if slopes is None else (positions[0] - positions[1]).abs_()
            result, sums = exact_attention(
                query, *keys, self.options, mask=tile.mask, distance=distance
            )
            self._write_lse(tile, sums)
        else:
            result = fused_attention(query, *keys, scale=self.options.scale, mask=tile.mask)
        if isinstance(tile.rows, slice):
            self._grouped_output(tile.rows, count).copy_(result)
        else:
            rows = result.flatten(2, 3).flatten(0, 1).to(self.output.dtype)
            self.output.index_copy_(0, tile.rows, rows)

    def _rows_of(self, tile: GroupTile) -> Tensor:
        if isinstance(tile.rows, slice):
            return self.query[tile.rows]
        return self.query.index_select(0, tile.rows)

    def _write_lse(self, tile: GroupTile, sums: Tensor) -> None:
        """Write LSE (R, Hkv, G, n) into its columns."""
        if self.lse is None:
            return
        columns = sums.permute(1, 2, 0, 3).flatten(2, 3).flatten(0, 1).to(self.lse.dtype)
        if isinstance(tile.rows, slice):
            self.lse[:, tile.rows].copy_(columns)
        else:
            self.lse.index_copy_(1, tile.rows, columns)

    def _grouped_output(self, rows: slice, count: int) -> Tensor:
        """Return a view (R, n, Hkv, G, Dv) of output rows."""
        own = self.output[rows]
        num_rows, heads, width = own.shape
        kv_heads = self.num_kv_heads
        return own.view(count, num_rows // count, kv_heads, heads // kv_heads, width)

    def _grouped_lse(self, lse: Tensor, count: int) -> Tensor:
        """Return lse (Hq, R * n) as a view (R, Hkv, G, n)."""
        heads, num_rows = lse.shape
        kv_heads = self.num_kv_heads
        grouped = lse.view(kv_heads, heads // kv_heads, count, num_rows // count)
        return grouped.permute(2, 0, 1, 3)


def _by_request(rows: Tensor, count: int) -> Tensor:
    """Return (R * n, Hq, D) as a view (R, n, Hq, D)."""
    num_rows, heads, width = rows.shape
    return rows.view(count, num_rows // count, heads, width)


def _cloned(keys: KeysValues) -> KeysValues:
    return KeysValues(keys.key.clone(), keys.value.clone())
