"""A step's work items, computed on the device from its lengths.

One program writes them, so that a captured step is right for whatever lengths the tensors hold when
it is replayed, and the host need not know them. The int32 buffer of a plan:

    0           number of decode items
    1           number of blocks of query rows that the prefill kernel works on
    2, 3        unused
    4           max_items records of 8: request, first key, one past the last key, parts of it, its
                keys, first query token, query tokens; the last is unused
    then        (B + 1) first item of each request that decodes, and the number of items
    then        (B + 1) first block of query rows of each request that does not
    then        B parts of each request
"""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl

from attn_triton.attention_variants import plan_variants
from attn_triton.kernels.sweep import bounds_of
from attn_triton.variants import KernelVariant

__all__ = ["HEADER", "RECORD", "plan_step", "variants"]

HEADER = 4
RECORD = 8
_HEADER = tl.constexpr(HEADER)
_RECORD = tl.constexpr(RECORD)


@triton.jit
def _quarters(tiles, size):
    """Return how many quarters of a slot's time the parts of a request take."""
    rest = tiles % size
    short = tl.where(4 * rest <= size, 1, tl.where(2 * rest <= size, 2, 4))
    return tl.maximum(tiles // size * 4 + tl.where(rest > 0, short, 0), 1)


@triton.jit
def _parts_in_wave(tiles, decodes, slots, max_items):
    """Cut so that all items run in one wave: return parts and the tiles of each, the same for all.

    The smallest part, in tiles, of which there are at most `slots` in all; where there are more
    requests than slots nothing is cut. Short requests, and what is left of long ones, share a
    slot, where the next one starts when one ends, as long as there are records for them.
    """
    low = 1
    high = tl.maximum(tl.max(tl.where(decodes, tiles, 1), 0), 1)
    while low < high:
        middle = (low + high) // 2
        taken = tl.sum(tl.where(decodes, _quarters(tiles, middle), 0), 0)
        items = tl.sum(tl.where(decodes, tl.maximum((tiles + middle - 1) // middle, 1), 0), 0)
        fits = (taken <= 4 * slots) & (items <= max_items)
        high = tl.where(fits, middle, high)
        low = tl.where(fits, low, middle + 1)
    return tl.maximum((tiles + low - 1) // low, 1), tiles * 0 + low


@triton.jit
def _parts_of_its_own(tiles, MAX_PARTS: tl.constexpr, LEAST: tl.constexpr):
    """Cut each request by its own length alone, whatever shares the batch."""
    size = tl.maximum((tiles + MAX_PARTS - 1) // MAX_PARTS, LEAST)
    return tl.maximum((tiles + size - 1) // size, 1), size


@triton.jit
def _store_request(record, length, start, query_len, live):
    """Write what decode must know of a request, so that it need not look that up elsewhere."""
    tl.store(record + 4, length, mask=live)
    tl.store(record + 5, start, mask=live)
    tl.store(record + 6, query_len, mask=live)


@triton.jit(do_not_specialize=["num_reqs", "max_items", "slots", "decode_rows", "group", "rows"])
def plan_step(
    plan_ptr,
    query_starts,
    lens_ptr,
    num_reqs,
    max_items,
    slots,
    decode_rows,
    group,
    rows,
    LEFT: tl.constexpr,
    CHUNK: tl.constexpr,
    DENSE: tl.constexpr,
    TILE: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    LEAST: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """Write a plan; launched with one program.

    Args:
        plan_ptr: the plan.
        query_starts: (B + 1,) int32.
        lens_ptr: (B,) int32 keys of each request; with DENSE (B + 1,) prefix sums, not looked at.
        num_reqs: B, at most BLOCK_B.
        max_items: records that the plan has room for.
        slots: items that one wave holds.
        decode_rows: query tokens up to which a request decodes.
        group: query heads per kv head.
        rows: query rows of a block of the prefill kernel.
        LEFT: keys that the window leaves to the left, -1 without one.
        CHUNK: of chunked local attention, 0 without.
        DENSE: keys come with the call, and nothing decodes.
        TILE: keys of a tile of the decode kernel.
        MAX_PARTS: in batch-invariant mode, into how many parts a request is cut at most; else 0.
        LEAST: in that mode, the least tiles of a part.
        BLOCK_B: a power of two.
    """
    b = tl.arange(0, BLOCK_B)
    exists = b < num_reqs
    start = tl.load(query_starts + b, mask=exists, other=0)
    query_len = tl.load(query_starts + b + 1, mask=exists, other=0) - start
    decodes = exists & (query_len > 0) & (query_len <= decode_rows)
    starts_at = plan_ptr + _HEADER + _RECORD * max_items
    count = 0
    if not DENSE:
        length = tl.load(lens_ptr + b, mask=exists, other=0)
        first, end = bounds_of(length - query_len, length, False, LEFT, -1, CHUNK, 0)
        tiles = (tl.maximum(end - first, 0) + TILE - 1) // TILE
        if MAX_PARTS > 0:
            parts, size = _parts_of_its_own(tiles, MAX_PARTS, LEAST)
        else:
            parts, size = _parts_in_wave(tiles, decodes, slots, max_items)
        parts = tl.where(decodes, parts, 0)
        # Items that take long come first, so that short ones fill what is left of the wave.
        early = tl.where(2 * tiles > size, parts, 0)
        late = parts - early
        item = tl.where(early > 0, tl.cumsum(early, 0), tl.sum(early, 0) + tl.cumsum(late, 0))
        item -= parts
        count = tl.minimum(tl.sum(parts, 0), max_items)
        tl.store(starts_at + 2 * (num_reqs + 1) + b, parts, mask=exists)
        tl.store(starts_at + b, item, mask=exists)
        tl.store(starts_at + num_reqs, count)
        for part in range(tl.max(parts, 0)):
            live = (part < parts) & (item + part < max_items)
            record = plan_ptr + _HEADER + _RECORD * (item + part)
            begin = first + part * size * TILE
            tl.store(record, b, mask=live)
            tl.store(record + 1, begin, mask=live)
            tl.store(record + 2, tl.minimum(begin + size * TILE, end), mask=live)
            tl.store(record + 3, parts, mask=live)
            _store_request(record, length, start, query_len, live)
    blocks = tl.where(decodes | (query_len == 0), 0, (query_len * group + rows - 1) // rows)
    block = tl.cumsum(blocks, 0) - blocks
    num_blocks = tl.sum(blocks, 0)
    tl.store(starts_at + num_reqs + 1 + b, block, mask=exists)
    tl.store(starts_at + 2 * num_reqs + 1, num_blocks)
    tl.store(plan_ptr, count)
    tl.store(plan_ptr + 1, num_blocks)


def variants(arch: str) -> Iterator[KernelVariant]:
    """Yield how the kernel is launched on an architecture."""
    yield from plan_variants(plan_step, arch)
