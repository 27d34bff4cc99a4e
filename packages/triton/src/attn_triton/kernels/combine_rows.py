"""The parts of many rows made one result: some rows at a time, part after part."""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl

from attn_triton.kernels.plan import HEADER, RECORD
from attn_triton.kernels.sweep import finish, row_start
from attn_triton.latent_variants import combine_rows_variants
from attn_triton.variants import KernelVariant

__all__ = ["combine_rows", "variants"]

_HEADER = tl.constexpr(HEADER)
_RECORD = tl.constexpr(RECORD)


@triton.jit(do_not_specialize=["num_reqs", "max_items", "max_rows", "lse_stride"])
def combine_rows(
    out_ptr,
    lse_ptr,
    part_ptr,
    stat_ptr,
    plan_ptr,
    query_starts,
    num_reqs,
    max_items,
    max_rows,
    lse_stride,
    HQ: tl.constexpr,
    DV: tl.constexpr,
    DVP: tl.constexpr,
    ROWS: tl.constexpr,
    O_TOKEN: tl.constexpr,
    O_HEAD: tl.constexpr,
):
    """Merge the parts of ROWS query rows of the one kv head; requests that are whole are left.

    Programs: (requests, blocks of ROWS in max_rows). For many rows of few parts, where a program
    for each row of `combine` would take longer to start than to run. Parts are taken one by one,
    so that a row's bits depend on its own parts alone. The arguments are those of `combine`.
    """
    blocks = (max_rows + ROWS - 1) // ROWS
    b = tl.program_id(0) // blocks
    starts_at = plan_ptr + _HEADER + _RECORD * max_items
    item = tl.load(starts_at + b)
    parts = tl.load(starts_at + 2 * (num_reqs + 1) + b)
    if parts <= 1:
        return
    q0 = tl.load(query_starts + b)
    num_rows = (tl.load(query_starts + b + 1) - q0) * HQ
    row = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    live = row < num_rows
    dv = tl.arange(0, DVP)
    inside = live[:, None] & (dv < DV)[None, :]
    m = row_start(ROWS)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DVP], tl.float32)
    for part in range(parts):
        slot = (item + part).to(tl.int64) * max_rows + row
        part_m = tl.load(stat_ptr + slot * 2, mask=live, other=-1e30)
        part_total = tl.load(stat_ptr + slot * 2 + 1, mask=live, other=0.0)
        values = tl.load(part_ptr + (slot[:, None] * DV + dv[None, :]), mask=inside, other=0.0)
        top = tl.maximum(m, part_m)
        weight = tl.math.exp2(part_m - top)
        fade = tl.math.exp2(m - top)
        total = total * fade + part_total * weight
        acc = acc * fade[:, None] + values * weight[:, None]
        m = top
    out, lse = finish(m, total, acc, 0.0, False)
    head = row % HQ
    token = q0 + row // HQ
    to = token.to(tl.int64) * O_TOKEN + head * O_HEAD
    tl.store(out_ptr + (to[:, None] + dv[None, :]), out.to(out_ptr.dtype.element_ty), mask=inside)
    if lse_ptr is not None:
        tl.store(lse_ptr + head.to(tl.int64) * lse_stride + token, lse, mask=live)


def variants(arch: str) -> Iterator[KernelVariant]:
    """Yield how the kernel is launched on an architecture."""
    yield from combine_rows_variants(combine_rows, arch)
