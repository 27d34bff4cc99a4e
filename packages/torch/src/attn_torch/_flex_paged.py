"""The plan of a compiled call: tiles that visit pages of one shared axis of keys.

A block mask names, for each tile, the pages that its kernel visits, by their places on the axis:
it is the block table, read through how the cache's blocks lie. The mask function goes the other
way, from a place on the axis to the absolute position in the sequence.

No tile visits a page of another request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_shared.errors import InvalidInputError
from attn_shared.spec import LayerSpec
from attn_torch._flex_call import BlockSparsity, FlexResult, call_compiled
from attn_torch._flex_masks import Logits, TileFacts, mask_mod
from attn_torch._flex_pages import block_step, gathered_pages, pages_in_place, visits
from attn_torch._flex_table import PagedTable
from attn_torch._flex_tiles import TileRows, cut, facts_of, padded
from attn_torch._flex_uncompiled import KeySlots
from attn_torch._spans import Span
from attn_torch._visibility import Visibility

__all__ = ["PagedPlan", "plan_paged"]

# Queries of a tile. From 64 on the CPU's kernel packs all keys of the axis for its matrix units,
# in place the whole cache; and its kernel for a single query lacks what it needs without full
# blocks.
_MOST_QUERIES = {"cpu": 63}
_MOST_QUERIES_ELSEWHERE = 128
_LEAST_QUERIES = {"cpu": 2}

_TILE_BYTES = 16 * 1024  # of a Triton tile of queries, keys or values in shared memory
_LEAST_ROWS = 16  # of such a tile: what tl.dot takes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PagedPlan:
    """One call: n tiles of R rows over pages of a shared axis.

    Attributes:
        rows: where the tiles' rows come from.
        facts: what masks have to know.
        visibility: of the layers.
        num_pages: (n, 1, 1) int32.
        pages: (n, 1, 1, W) int32: places of each tile's pages in units of a page.
        positions: (M,) int32: absolute position of each page's first key.
        page_size: tokens per page.
        step: places on the axis from one page to the next.
        num_spanned: leading blocks of the cache that hold all pages; 0 where keys are gathered.
        slots: (S,) where keys are gathered from; None in place.
    """

    rows: TileRows
    facts: TileFacts
    visibility: Visibility
    num_pages: Tensor
    pages: Tensor
    positions: Tensor
    page_size: int
    step: int
    num_spanned: int
    slots: KeySlots | None

    def run(
        self, query: Tensor, key: Tensor, value: Tensor, logits: Logits, *, with_lse: bool
    ) -> FlexResult:
        """Attend; arguments and result as those of `DensePlan.run`.

        Raises:
            InvalidInputError: the cache's strides are not those that the plan was made for.
        """
        num_kv_heads = key.shape[-2]
        group = query.shape[1] // num_kv_heads
        positions, step = self.positions, self.step

        def key_position(tile: Tensor, place: Tensor) -> Tensor:
            return positions[place // step] + place % step

        keys, values = self._axis("key", key, query.dtype), self._axis("value", value, query.dtype)
        taken = self.rows.take(query, num_kv_heads)
        self._mark_varying(taken, keys, values)
        return call_compiled(
            taken,
            keys,
            values,
            blocks=self._blocks(taken, keys),
            mask_mod=mask_mod(self.facts, self.visibility, group, key_position),
            score_mod=logits.score_mod(self.facts.first_position, group, key_position),
            scale=logits.scale,
            kernel_options=self._kernel_options(taken, values),
            with_lse=with_lse,
            kind=(group, _constants(logits), *self._kind(taken, keys, values)),
        )

    def _axis(self, name: str, source: Tensor, dtype: torch.dtype) -> Tensor:
        """Return keys or values as (1, Hkv, places, width)."""
        if self.slots is not None:
            return self.slots.read(source, dtype).transpose(0, 1).unsqueeze(0)
        if block_step(source) != self.step:
            raise InvalidInputError.for_argument(
                f"{name} strides in kv_cache",
                source.stride(),
                f"those of the layer's kv_cache_spec, whose blocks lie {self.step} tokens apart",
                hint="allocate the cache with kv_cache_spec.allocate, or build with "
                "FlexOptions(compile=False), which takes any strides.",
            )
        is_static = source.device.type == "cpu"  # then the axis must not change with the batch
        num_blocks = source.shape[0] if is_static else self.num_spanned
        size, heads, width = source.shape[1:]
        places = (num_blocks - 1) * self.step + size
        per_head, per_token = source.stride(2), source.stride(0) // self.step
        return source.as_strided((1, heads, places, width), (per_head, per_head, per_token, 1))

    def _blocks(self, query: Tensor, key: Tensor) -> BlockSparsity:
        queries, pages = query.shape[2], self.pages
        if query.device.type == "cpu":
            # The CPU's lowering wants as many columns as the axis has pages, and reads those that
            # count: rows that overlap in memory have them at no cost.
            num_tiles, width = pages.shape[0], pages.shape[3]
            columns = -(-key.shape[2] // self.page_size)
            flat = pages.new_zeros(num_tiles * width + columns)
            flat[: pages.numel()] = pages.flatten()
            pages = flat.as_strided((num_tiles, 1, 1, columns), (width, width, width, 1))
            return BlockSparsity(self.num_pages, pages, queries, self.page_size)
        block = _triton_rows(queries, query)
        return BlockSparsity(self.num_pages, pages, -(-queries // block) * block, self.page_size)

    def _kernel_options(self, query: Tensor, value: Tensor) -> dict[str, Any] | None:
        """Return sizes that fit the shared memory of every GPU of the last years (96 KiB)."""
        if query.device.type == "cpu":
            return None
        most, row_bytes = _triton_tile(query, value)
        options: dict[str, Any] = {
            "BLOCK_M": _triton_rows(query.shape[2], query),
            "BLOCK_N": min(most, self.page_size & -self.page_size),
            "num_warps": 4,
            "num_stages": 2 if row_bytes <= _TILE_BYTES // _LEAST_ROWS else 1,
            # The kernel for short queries splits keys by the number of tiles in the batch.
            "FORCE_USE_FLEX_ATTENTION": True,
        }
        if query.dtype is torch.float32:
            options["FLOAT32_PRECISION"] = "'ieee'"  # never TF32, whatever torch is set to
        return options

    def _mark_varying(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Tell torch.compile which sizes change from step to step."""
        if query.device.type == "cpu":
            return
        first = [query, self.num_pages, self.pages, self.positions, *self._fact_tensors()]
        sizes = [(tensor, 0) for tensor in first] + [(key, 2), (value, 2), (self.pages, 3)]
        for tensor, dim in sizes:
            torch._dynamo.maybe_mark_dynamic(tensor, dim)

    def _fact_tensors(self) -> list[Tensor]:
        facts = self.facts
        optional = [facts.causal, facts.ranges]
        tensors = [each for each in optional if isinstance(each, Tensor)]
        return [facts.first_position, facts.key_len, *tensors]

    def _kind(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[object, ...]:
        """Return all else that the generated code depends on."""
        shapes: tuple[object, ...] = (query.shape[1:], key.shape[1], key.shape[3], value.shape[3])
        if query.device.type == "cpu":
            shapes = (query.shape, key.shape, value.shape, self.pages.shape, self.positions.shape)
        facts = self.facts
        causal = facts.causal if isinstance(facts.causal, bool) else None
        rules = (self.visibility, causal, facts.num_ranges, self.page_size, self.step)
        return (query.dtype, shapes, key.stride(), value.stride(), rules)


def plan_paged(
    spans: Sequence[Span],
    table: PagedTable | None,
    visibility: Visibility,
    spec: LayerSpec,
    device: torch.device,
) -> PagedPlan:
    """Return one call that covers all rows of the spans.

    Args:
        spans: rows of requests that see at least one key; not empty.
        table: of the cache; None where the keys come with the call.
        visibility: window and chunk of the layers.
        spec: any of the layers.
        device: where the kernel runs.

    Raises:
        MetadataError: keys that must be gathered are more than 32-bit offsets reach.
    """
    num_rows = _rows_per_tile(spans, spec.queries_per_kv, device)
    tiles = [tile for span in spans for tile in cut(span, visibility, num_rows)]
    num_slots = padded(len(tiles))
    pages = pages_in_place(table, spec, device) or gathered_pages(tiles, spans, table, spec, device)
    num_pages, numbers = visits(tiles, num_slots, pages)
    positions = torch.zeros(padded(len(pages.positions)), dtype=torch.int32)
    positions[: len(pages.positions)] = pages.positions
    return PagedPlan(
        rows=TileRows.of(tiles, num_slots, num_rows, device),
        facts=facts_of(tiles, num_slots, device),
        visibility=visibility,
        num_pages=num_pages.view(-1, 1, 1).to(device),
        pages=numbers.unsqueeze(1).unsqueeze(1).to(device),
        positions=positions.to(device),
        page_size=pages.size,
        step=pages.step,
        num_spanned=0 if table is None or pages.slots else table.num_spanned,
        slots=pages.slots,
    )


def _rows_per_tile(spans: Sequence[Span], group: int, device: torch.device) -> int:
    longest = max(span.query_len for span in spans)
    most = _MOST_QUERIES.get(device.type, _MOST_QUERIES_ELSEWHERE) // group
    fewest = -(-_LEAST_QUERIES.get(device.type, 1) // group)
    most = 1 << max(most, 1).bit_length() - 1
    return max(fewest, min(most, 1 << (longest - 1).bit_length()))


def _constants(logits: Logits) -> tuple[object, ...]:
    return (logits.scale, logits.softcap, logits.slopes is None)


def _triton_tile(query: Tensor, value: Tensor) -> tuple[int, int]:
    """Return the most rows of a Triton tile, and the bytes of one row."""
    width = max(query.shape[3], value.shape[3])
    row_bytes = (1 << (width - 1).bit_length()) * query.dtype.itemsize
    return max(_LEAST_ROWS, min(64, _TILE_BYTES // row_bytes)), row_bytes


def _triton_rows(queries: int, query: Tensor) -> int:
    most, _ = _triton_tile(query, query)
    return min(most, max(_LEAST_ROWS, 1 << (queries - 1).bit_length()))
