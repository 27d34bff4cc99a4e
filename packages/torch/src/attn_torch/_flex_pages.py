"""Pages: where keys lie on the axis that a compiled call reads.

In place, the axis is the cache itself: a cache whose blocks lie a whole number of blocks apart is
an axis with gaps, and a block is a page. That needs a block to have one position, as it has where
requests share a prefix. In all other cases (a block at two columns, odd block sizes or strides, a
cache of another dtype, keys that come with the call) keys are gathered into pages first.

A page holds keys of one request alone, or of requests that share its block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_shared.errors import MetadataError
from attn_shared.kv_cache import AttentionSpec
from attn_shared.spec import LayerSpec
from attn_torch._flex_table import PagedTable
from attn_torch._flex_tiles import Tile, padded
from attn_torch._flex_uncompiled import KeySlots
from attn_torch._spans import Span

__all__ = ["INDEX_LIMIT", "Pages", "block_step", "gathered_pages", "pages_in_place", "visits"]

INDEX_LIMIT = 2**31
"""Elements that the generated Triton kernels can address: their offsets are 32-bit."""

_PAGE = 64  # tokens per page of gathered keys
_LEAST_BLOCK = 16  # tl.dot takes no fewer keys, and below that a page costs more than its keys


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pages:
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


def pages_in_place(table: PagedTable | None, spec: LayerSpec, device: torch.device) -> Pages | None:
    """Return the cache's blocks as pages, or None where they cannot be."""
    cache = spec.kv_cache_spec
    if table is None or not isinstance(cache, AttentionSpec):
        return None
    if cache.dtype is not spec.dtype or cache.block_size % _LEAST_BLOCK:
        return None
    views = cache.split(cache.allocate(2, "meta"))
    steps = {block_step(views.key), block_step(views.value)}
    step = steps.pop()
    reach = table.num_spanned * cache.page_size_bytes // cache.dtype.itemsize
    if steps or step is None or (device.type != "cpu" and reach >= INDEX_LIMIT):
        return None
    columns = table.columns_by_block()
    if columns is None:
        return None
    return Pages(
        places=table.blocks,
        positions=columns * cache.block_size,
        size=cache.block_size,
        step=step,
        slots=None,
    )


def block_step(view: Tensor) -> int | None:
    """Return the tokens from one block to the next; None where that is no whole number of blocks.

    Args:
        view: (num_blocks, block_size, Hkv, width).
    """
    size = view.shape[1]
    step, rest = divmod(view.stride(0), view.stride(1))
    return None if rest or step % size else step


def gathered_pages(
    tiles: Sequence[Tile],
    spans: Sequence[Span],
    table: PagedTable | None,
    spec: LayerSpec,
    device: torch.device,
) -> Pages:
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
    return Pages(
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


def visits(tiles: Sequence[Tile], num_slots: int, pages: Pages) -> tuple[Tensor, Tensor]:
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
