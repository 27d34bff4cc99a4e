"""The plan of a compiled call: tiles that visit pages of one shared axis of keys.

A block mask names, for each tile, the pages that its kernel visits, by their places on the axis of
keys. In place, the axis is the cache itself: a cache whose blocks lie a whole number of blocks
apart is an axis with gaps, and the block table, read through that, is the block mask. The mask
function goes the other way, from a place on the axis to the absolute position in the sequence. It
is a function of the block alone as long as each block stands at one column, which also holds where
requests share a prefix. In all other cases (a block at two columns, odd block sizes or strides, a
cache of another dtype, keys that come with the call) the keys are gathered into pages first.

No tile visits a page of another request, and a page holds keys of one request alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_shared.errors import InvalidInputError, MetadataError
from attn_shared.kv_cache import AttentionSpec
from attn_shared.spec import LayerSpec
from attn_torch._flex_call import BlockSparsity, FlexResult, call_compiled
from attn_torch._flex_masks import TileFacts, mask_mod, score_mod
from attn_torch._flex_table import PagedTable
from attn_torch._flex_tiles import Tile, TileRows, cut, facts_of, padded
from attn_torch._flex_uncompiled import KeySlots
from attn_torch._spans import Span
from attn_torch._visibility import Visibility

__all__ = ["INDEX_LIMIT", "PagedPlan", "plan_paged"]

INDEX_LIMIT = 2**31
"""Elements that the generated Triton kernels can address: their offsets are 32-bit."""

_PAGE = 64  # tokens per page of gathered keys
_LEAST_BLOCK = 16  # tl.dot takes no fewer keys, and below that a page costs more than its keys

# Queries of a tile. From 64 on the CPU's kernel packs all keys of the axis for its matrix units,
# in place the whole cache; and its kernel for a single query lacks what it needs without full
# blocks.
_MOST_QUERIES = {"cpu": 63}
_MOST_QUERIES_ELSEWHERE = 128
_LEAST_QUERIES = {"cpu": 2}

_TILE_BYTES = 16 * 1024  # of a Triton tile of queries, keys or values in shared memory


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Pages:
    """Pages on an axis of keys.

    Attributes:
        places: (B, M) int64: the page that holds column m of request b.
        positions: (number of pages,) int64: absolute position of each page's first key.
        size: tokens per page.
        step: places on the axis from one page to the next, a multiple of `size`.
        slots: where the keys are gathered from; None in place.
    """

    places: Tensor
    positions: Tensor
    size: int
    step: int
    slots: KeySlots | None


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
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        softcap: float | None,
        slopes: Tensor | None,
        with_lse: bool,
    ) -> FlexResult:
        """Attend; arguments and result as those of `DensePlan.run`.

        Raises:
            InvalidInputError: the cache's strides are not those that the plan was made for.
        """
        num_kv_heads = key.shape[-2]
        group = query.shape[1] // num_kv_heads
        taken = self.rows.take(query, num_kv_heads)
        keys, values = self._axis("key", key, query.dtype), self._axis("value", value, query.dtype)
        positions, step = self.positions, self.step

        def key_position(tile: Tensor, place: Tensor) -> Tensor:
            return positions[place // step] + place % step

        facts = self.facts
        self._mark_varying(taken, keys, values)
        return call_compiled(
            taken,
            keys,
            values,
            blocks=self._blocks(taken, keys),
            mask_mod=mask_mod(facts, self.visibility, group, key_position),
            score_mod=score_mod(
                softcap=softcap,
                slopes=slopes,
                first_position=facts.first_position,
                group=group,
                key_position=key_position,
            ),
            scale=scale,
            kernel_options=self._kernel_options(taken, values),
            with_lse=with_lse,
            kind=self._kind(taken, keys, values, group, (scale, softcap, slopes is None)),
        )

    def _axis(self, name: str, source: Tensor, dtype: torch.dtype) -> Tensor:
        """Return keys or values as (1, Hkv, places, width)."""
        if self.slots is not None:
            return self.slots.read(source, dtype).transpose(0, 1).unsqueeze(0)
        if _step_of(source) != self.step:
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
            "num_stages": 2 if row_bytes <= _TILE_BYTES // _LEAST_BLOCK else 1,
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

    def _kind(
        self, query: Tensor, key: Tensor, value: Tensor, group: int, constants: tuple[object, ...]
    ) -> tuple[object, ...]:
        """Return all that the generated code depends on."""
        shapes: tuple[object, ...] = (query.shape[1:], key.shape[1], key.shape[3], value.shape[3])
        if query.device.type == "cpu":
            shapes = (query.shape, key.shape, value.shape, self.pages.shape, self.positions.shape)
        strides = (key.stride(), value.stride())
        facts = self.facts
        causal = facts.causal if isinstance(facts.causal, bool) else None
        rules = (self.visibility, causal, facts.num_ranges, group, self.page_size, self.step)
        return (query.dtype, shapes, strides, rules, constants)


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
    pages = _in_place(table, spec, device) or _gathered(tiles, spans, table, spec, device)
    num_pages, numbers = _visits(tiles, num_slots, pages)
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


def _in_place(table: PagedTable | None, spec: LayerSpec, device: torch.device) -> _Pages | None:
    """Return the cache's blocks as pages, or None where they cannot be."""
    cache = spec.kv_cache_spec
    if table is None or not isinstance(cache, AttentionSpec):
        return None
    if cache.dtype is not spec.dtype or cache.block_size % _LEAST_BLOCK:
        return None
    views = cache.split(cache.allocate(2, "meta"))
    steps = {_step_of(views.key), _step_of(views.value)}
    step = steps.pop()
    reach = table.num_spanned * cache.page_size_bytes // cache.dtype.itemsize
    if steps or step is None or (device.type != "cpu" and reach >= INDEX_LIMIT):
        return None
    columns = table.columns_by_block()
    if columns is None:
        return None
    return _Pages(
        places=table.blocks,
        positions=columns * cache.block_size,
        size=cache.block_size,
        step=step,
        slots=None,
    )


def _step_of(view: Tensor) -> int | None:
    """Return the tokens from one block to the next; None where that is no whole number of blocks.

    Args:
        view: (num_blocks, block_size, Hkv, width).
    """
    size = view.shape[1]
    step, rest = divmod(view.stride(0), view.stride(1))
    return None if rest or step % size else step


def _gathered(
    tiles: Sequence[Tile],
    spans: Sequence[Span],
    table: PagedTable | None,
    spec: LayerSpec,
    device: torch.device,
) -> _Pages:
    """Return pages of gathered keys, for each request those that its tiles visit."""
    bounds: dict[int, tuple[int, int]] = {}
    for tile in tiles:
        first, stop = bounds.get(tile.span.request, (tile.first_key, tile.stop_key))
        bounds[tile.span.request] = (min(first, tile.first_key), max(stop, tile.stop_key))
    most = max(-(-stop // _PAGE) for _, stop in bounds.values())
    places = torch.zeros(1 + max(bounds), most, dtype=torch.int64)
    columns: list[Tensor] = []
    owners: list[Tensor] = []
    last_keys: list[Tensor] = []
    num_pages = 0
    for span in spans:
        first, stop = bounds[span.request]
        own = torch.arange(first // _PAGE, -(-stop // _PAGE))
        places[span.request, own] = torch.arange(num_pages, num_pages + len(own))
        num_pages += len(own)
        columns.append(own)
        owners.append(torch.full_like(own, span.key_start if table is None else span.request))
        last_keys.append(torch.full_like(own, stop - 1))
    column, owner, last_key = (_filled(torch.cat(each)) for each in (columns, owners, last_keys))
    _check_reach(len(column) * _PAGE, spec, device)
    # Places past a request's last key repeat it, so that nothing else is read.
    key = torch.minimum(column.unsqueeze(1) * _PAGE + torch.arange(_PAGE), last_key.unsqueeze(1))
    owner = owner.unsqueeze(1).expand_as(key)
    return _Pages(
        places=places,
        positions=column * _PAGE,
        size=_PAGE,
        step=_PAGE,
        slots=KeySlots.of(owner.flatten(), key.flatten(), table, device),
    )


def _filled(column: Tensor) -> Tensor:
    """Return the column padded with its first entry, a page that is read anyway."""
    return torch.cat([column, column[:1].expand(padded(len(column)) - len(column))])


def _check_reach(num_keys: int, spec: LayerSpec, device: torch.device) -> None:
    width = spec.num_kv_heads * max(spec.head_size, spec.head_size_v)
    if device.type != "cpu" and num_keys * width >= INDEX_LIMIT:
        raise MetadataError.for_argument(
            "keys to gather",
            num_keys,
            f"fewer than {INDEX_LIMIT // width}: the kernel's offsets are 32-bit",
            hint="run fewer requests per step.",
        )


def _visits(tiles: Sequence[Tile], num_slots: int, pages: _Pages) -> tuple[Tensor, Tensor]:
    """Return int32 (num_slots,) and (num_slots, W): how many pages each tile visits, and which."""
    first = torch.tensor([tile.first_key // pages.size for tile in tiles])
    stop = torch.tensor([-(-tile.stop_key // pages.size) for tile in tiles])
    count = stop - first
    width = padded(int(count.max()))
    offset = torch.arange(width)
    column = torch.minimum(first.unsqueeze(1) + offset, stop.unsqueeze(1) - 1)
    request = torch.tensor([[tile.span.request] for tile in tiles])
    is_own = offset < count.unsqueeze(1)
    numbers = torch.where(is_own, pages.places[request, column], 0) * (pages.step // pages.size)
    visits = torch.zeros(num_slots, dtype=torch.int32)
    visits[: len(tiles)] = count
    padded_numbers = torch.zeros(num_slots, width, dtype=torch.int32)
    padded_numbers[: len(tiles)] = numbers
    return visits, padded_numbers


def _triton_tile(query: Tensor, value: Tensor) -> tuple[int, int]:
    """Return the most rows of a Triton tile, and the bytes of one row."""
    width = max(query.shape[3], value.shape[3])
    row_bytes = (1 << (width - 1).bit_length()) * query.dtype.itemsize
    return max(_LEAST_BLOCK, min(64, _TILE_BYTES // row_bytes)), row_bytes


def _triton_rows(queries: int, query: Tensor) -> int:
    most, _ = _triton_tile(query, query)
    return min(most, max(_LEAST_BLOCK, 1 << (queries - 1).bit_length()))
