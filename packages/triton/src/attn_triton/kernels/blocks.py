"""A step's blocks of query tokens, listed on the device from its lengths, and pages made rows.

One program writes the list, so that a captured step is right for whatever lengths the tensors hold
when it is replayed. The int32 buffer:

    0           number of blocks
    1, 2        what programs of the kernel for Hopper have taken, and how many of them are done:
                0 between launches
    3           unused
    4           B first rows of requests, where keys are copied out of pages
    then        max_blocks records of 2: request, first token of the block; the last blocks of a
                request, which see most keys, first
"""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl

from attn_triton.prompt_variants import block_variants, copy_variants
from attn_triton.variants import KernelVariant

__all__ = ["HEADER", "copy_pages", "plan_blocks", "variants"]

HEADER = 4
_HEADER = tl.constexpr(HEADER)


@triton.jit(do_not_specialize=["num_reqs", "max_blocks", "decode_tokens", "rows"])
def plan_blocks(
    blocks_ptr,
    query_starts,
    lens_ptr,
    num_reqs,
    max_blocks,
    decode_tokens,
    rows,
    PREFIX: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """List the blocks of requests that do not decode; launched with one program.

    Args:
        blocks_ptr: the list.
        query_starts: (B + 1,) int32.
        lens_ptr: (B,) int32 keys of each request; with PREFIX prefix sums, not looked at.
        num_reqs: B, at most BLOCK_B.
        max_blocks: records that there is room for.
        decode_tokens: query tokens up to which a request decodes.
        rows: query tokens of a block.
        PREFIX: keys come with the call.
        BLOCK_B: a power of two.
    """
    b = tl.arange(0, BLOCK_B)
    exists = b < num_reqs
    start = tl.load(query_starts + b, mask=exists, other=0)
    query_len = tl.load(query_starts + b + 1, mask=exists, other=0) - start
    is_long = exists & (query_len > decode_tokens)
    blocks = tl.where(is_long, (query_len + rows - 1) // rows, 0)
    first = tl.cumsum(blocks, 0) - blocks
    tl.store(blocks_ptr, tl.minimum(tl.sum(blocks, 0), max_blocks))
    tl.store(blocks_ptr + 1, 0)
    tl.store(blocks_ptr + 2, 0)
    if not PREFIX:
        keys = tl.where(is_long, tl.load(lens_ptr + b, mask=exists, other=0), 0)
        tl.store(blocks_ptr + _HEADER + b, tl.cumsum(keys, 0) - keys, mask=exists)
    records = blocks_ptr + _HEADER + num_reqs
    for i in range(tl.max(blocks, 0)):
        place = first + i
        live = (i < blocks) & (place < max_blocks)
        tl.store(records + 2 * place, b, mask=live)
        tl.store(records + 2 * place + 1, (blocks - 1 - i) * rows, mask=live)


@triton.jit(do_not_specialize=["num_reqs", "decode_tokens", "table_stride", "chunks", "most_rows"])
def copy_pages(
    k_ptr,
    v_ptr,
    k_rows,
    v_rows,
    blocks_ptr,
    table_ptr,
    lens_ptr,
    query_starts,
    num_reqs,
    decode_tokens,
    table_stride,
    chunks,
    most_rows,
    HK: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    PAGE: tl.constexpr,
    K_BLOCK: tl.constexpr,
    K_TOKEN: tl.constexpr,
    K_HEAD: tl.constexpr,
    V_BLOCK: tl.constexpr,
    V_TOKEN: tl.constexpr,
    V_HEAD: tl.constexpr,
    FRESH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Copy keys and values of requests that do not decode from pages to rows, widened if need be.

    Programs: (requests, chunks, HK), the last fastest; those past a request's keys do nothing. The
    rows of a request start where `plan_blocks` says. With FRESH the step's keys are left out.

    What the parameters are:

        k_ptr: (blocks, PAGE, HK, D) by strides.
        v_ptr: (blocks, PAGE, HK, DV).
        k_rows: (rows, HK, D).
        v_rows: (rows, HK, DV).
        chunks: of ROWS keys that a request has at most.
        most_rows: that there is room for; lengths that the host did not know end there.
    """
    head = tl.program_id(0) % HK
    at = tl.program_id(0) // HK % chunks * ROWS
    b = tl.program_id(0) // HK // chunks
    query_len = tl.load(query_starts + b + 1) - tl.load(query_starts + b)
    stop = tl.load(lens_ptr + b)
    if FRESH:
        stop -= query_len
    if query_len <= decode_tokens or at >= stop:
        return
    n = at + tl.arange(0, ROWS)
    first = tl.load(blocks_ptr + _HEADER + b)
    live = n < tl.minimum(stop, most_rows - first)
    table = table_ptr + b.to(tl.int64) * table_stride
    page = tl.load(table + n // PAGE, mask=live, other=0).to(tl.int64)
    row = first + n.to(tl.int64)
    d = tl.arange(0, D)
    dv = tl.arange(0, DV)
    k_at = page * K_BLOCK + n % PAGE * K_TOKEN + head * K_HEAD
    v_at = page * V_BLOCK + n % PAGE * V_TOKEN + head * V_HEAD
    k = tl.load(k_ptr + (k_at[:, None] + d[None, :]), mask=live[:, None])
    v = tl.load(v_ptr + (v_at[:, None] + dv[None, :]), mask=live[:, None])
    to = row * HK + head
    k = k.to(k_rows.dtype.element_ty)
    v = v.to(v_rows.dtype.element_ty)
    tl.store(k_rows + ((to * D)[:, None] + d[None, :]), k, mask=live[:, None])
    tl.store(v_rows + ((to * DV)[:, None] + dv[None, :]), v, mask=live[:, None])


def variants(arch: str) -> Iterator[KernelVariant]:
    """Yield how the kernels are launched on an architecture."""
    yield from block_variants(plan_blocks, arch)
    yield from copy_variants(copy_pages, arch)
