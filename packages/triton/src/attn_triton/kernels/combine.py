"""The parts of a request's keys made one result, in one pass."""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl

from attn_triton.attention_variants import combine_variants
from attn_triton.kernels.dependent import wait_for_earlier
from attn_triton.kernels.plan import HEADER, RECORD
from attn_triton.kernels.sweep import finish, row_start
from attn_triton.variants import KernelVariant

__all__ = ["combine", "variants"]

_HEADER = tl.constexpr(HEADER)
_RECORD = tl.constexpr(RECORD)


@triton.jit(do_not_specialize=["num_reqs", "max_items", "max_rows", "lse_stride"])
def combine(
    out_ptr,
    lse_ptr,
    part_ptr,
    stat_ptr,
    plan_ptr,
    query_starts,
    sinks_ptr,
    num_reqs,
    max_items,
    max_rows,
    lse_stride,
    HQ: tl.constexpr,
    HK: tl.constexpr,
    DV: tl.constexpr,
    DVP: tl.constexpr,
    BV: tl.constexpr,
    PARTS: tl.constexpr,
    O_TOKEN: tl.constexpr,
    O_HEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """Merge the parts of one query row; those of requests that were not cut are left alone.

    Programs: (requests, kv heads, max_rows, DVP / BV), the last fastest: each has BV columns. Parts
    are taken PARTS at a time, always in the same order, so that a row's bits depend on its own
    parts alone. The sink enters here, once. The arguments are those of `decode`.
    """
    COLUMNS: tl.constexpr = DVP // BV
    at_row = tl.program_id(0) // COLUMNS
    row = at_row % max_rows
    kv_head = at_row // max_rows % HK
    b = at_row // max_rows // HK
    starts_at = plan_ptr + _HEADER + _RECORD * max_items
    item = tl.load(starts_at + b)
    parts = tl.load(starts_at + 2 * (num_reqs + 1) + b)
    q0 = tl.load(query_starts + b)
    num_rows = (tl.load(query_starts + b + 1) - q0) * (HQ // HK)
    # All above was there before the parts were made; see `dependent`.
    wait_for_earlier(PDL)
    if parts <= 1 or row >= num_rows:
        return
    dv = tl.program_id(0) % COLUMNS * BV + tl.arange(0, BV)
    m = row_start(1)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, BV], tl.float32)
    for begin in range(0, parts, PARTS):
        part = begin + tl.arange(0, PARTS)
        live = part < parts
        slot = ((item + part) * HK + kv_head).to(tl.int64) * max_rows + row
        part_m = tl.load(stat_ptr + slot * 2, mask=live, other=-1e30)
        part_total = tl.load(stat_ptr + slot * 2 + 1, mask=live, other=0.0)
        values = tl.load(
            part_ptr + (slot[:, None] * DV + dv[None, :]),
            mask=live[:, None] & (dv < DV)[None, :],
            other=0.0,
        )
        top = tl.maximum(m, tl.max(part_m, 0))
        weight = tl.math.exp2(part_m - tl.max(top, 0))
        fade = tl.math.exp2(m - top)
        total = total * fade + tl.sum(part_total * weight, 0)
        acc = acc * fade[:, None] + tl.sum(values * weight[:, None], 0)[None, :]
        m = top
    head = kv_head * (HQ // HK) + row % (HQ // HK)
    token = q0 + row // (HQ // HK)
    sink = 0.0
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head)
    out, lse = finish(m, total, acc, sink, sinks_ptr is not None)
    to = out_ptr + token.to(tl.int64) * O_TOKEN + head * O_HEAD
    values = out.to(out_ptr.dtype.element_ty)
    tl.store(to + dv[None, :], values, mask=(dv < DV)[None, :])
    if lse_ptr is not None:
        one = tl.arange(0, 1)
        is_wanted = one == tl.program_id(0) % COLUMNS + tl.minimum(lse_stride, 0)
        tl.store(lse_ptr + head.to(tl.int64) * lse_stride + token + one, lse, mask=is_wanted)


def variants(arch: str) -> Iterator[KernelVariant]:
    """Yield how the kernel is launched on an architecture."""
    yield from combine_variants(combine, arch)
