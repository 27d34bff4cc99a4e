"""Attention of few query tokens per request over a paged cache of latents, cut into parts.

All heads of a request share one cache entry per token: its latent is both key and value, its rope
part is key alone. A tile of latents is therefore loaded once for both products and for all heads of
a program. Rows are as in `decode` with one kv head: row i of a request is query token i // H of
head i % H.
"""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl

from attn_triton.kernels.dependent import release_next, wait_for_earlier
from attn_triton.kernels.plan import HEADER, RECORD
from attn_triton.kernels.sweep import bounds_of, finish, row_start
from attn_triton.latent_variants import mla_decode_variants
from attn_triton.variants import KernelVariant

__all__ = ["mla_decode", "variants"]

_HEADER = tl.constexpr(HEADER)
_RECORD = tl.constexpr(RECORD)
_CHUNK = tl.constexpr(64)  # columns of float32 that are multiplied at a time, in registers


@triton.jit
def _load_rows(base, at, width, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Return rows that begin at `at`, zero past WIDTH."""
    if WIDTH == PADDED:
        return tl.load(base + (at[:, None] + width[None, :]))
    return tl.load(base + (at[:, None] + width[None, :]), mask=(width < WIDTH)[None, :], other=0.0)


@triton.jit
def _halves(q_latent, q_rope, scale):
    """Return both parts of bfloat16 query rows in float16, and the logits' factor of each row.

    As `sweep.in_half`: fp8 turns into float16 by one instruction for two numbers. float16 lacks
    bfloat16's range, so that each row is divided by a power of two first.
    """
    latent = q_latent.to(tl.float32)
    rope = q_rope.to(tl.float32)
    size = tl.maximum(tl.max(tl.abs(latent), 1), tl.max(tl.abs(rope), 1))
    power = tl.math.exp2(tl.math.ceil(tl.math.log2(tl.where(size > 0, size, 1.0))))
    latent = (latent / power[:, None]).to(tl.float16)
    rope = (rope / power[:, None]).to(tl.float16)
    return latent, rope, (power * scale)[:, None]


@triton.jit
def _chunked_logits(q, live, k, s, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Add products of rows to `s`, a few columns at a time, read anew for each tile of keys.

    Products of float32 without TF32 hold their operands in registers, which whole rows would not
    fit.

    Args:
        q: (rows,) pointers.
        live: (rows,) which of them may be read.
        k: (keys,) pointers.
        s: (rows, keys) sums.
        WIDTH: columns.
        PADDED: columns with those that are read as 0.
    """
    for begin in range(0, PADDED, min(PADDED, _CHUNK)):
        d = begin + tl.arange(0, min(PADDED, _CHUNK))
        inside = (d < WIDTH)[None, :]
        rows = tl.load(q[:, None] + d[None, :], mask=live[:, None] & inside, other=0.0)
        keys = tl.load(k[:, None] + d[None, :], mask=inside, other=0.0).to(rows.dtype)
        part = tl.dot(rows, tl.trans(keys), input_precision="ieee")
        # By an FMA, which is not made one chain with the product: short sums round less.
        s = tl.fma(part, tl.zeros_like(part) + 1.0, s)
    return s


@triton.jit(do_not_specialize=["num_reqs", "max_items", "max_rows", "table_stride", "lse_stride"])
def mla_decode(  # size: one algorithm
    q_ptr,
    cache_ptr,
    latent_tiles,
    rope_tiles,
    out_ptr,
    lse_ptr,
    part_ptr,
    stat_ptr,
    plan_ptr,
    table_ptr,
    scale_ptr,
    num_reqs,
    max_items,
    max_rows,
    table_stride,
    lse_stride,
    scale,
    cache_scale,
    HQ: tl.constexpr,
    DL: tl.constexpr,
    DR: tl.constexpr,
    DLP: tl.constexpr,
    DRP: tl.constexpr,
    ROWS: tl.constexpr,
    BN: tl.constexpr,
    STAGES: tl.constexpr,
    PAGE: tl.constexpr,
    Q_TOKEN: tl.constexpr,
    Q_HEAD: tl.constexpr,
    O_TOKEN: tl.constexpr,
    O_HEAD: tl.constexpr,
    K_BLOCK: tl.constexpr,
    K_TOKEN: tl.constexpr,
    CAUSAL: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attend to one part of a request's latents for up to ROWS query rows.

    Programs: (items of the plan, blocks of ROWS in max_rows), the last fastest, so that the blocks
    that read the same latents run side by side; those past the plan's items do nothing. A request
    of one part is written as it is, the parts of others go to the combine kernel. Absent pointers
    are None.

    With descriptors a tile lies in one page (PAGE is a multiple of BN) and is read whole, the slots
    past a request's end included, whose finite numbers have weight 0. Without them rows past the
    end read the last one, and no other slot is looked at.

    What the parameters are:

        q_ptr: (T, HQ, DL + DR), absorbed.
        cache_ptr: (blocks, PAGE, DL + DR) by strides; fp8 too.
        latent_tiles: descriptor of the cache's rows, tiles of (BN, DLP); None: rows by pointer.
        rope_tiles: the same of the rope parts, tiles of (BN, DRP).
        out_ptr: (T, HQ, DL).
        lse_ptr: (HQ, T) float32, natural logarithms.
        part_ptr: (items, max_rows, DL) float32: weighted latents of parts.
        stat_ptr: (items, max_rows, 2) float32: their maxima and sums.
        plan_ptr: of `plan_step`, for one kv head.
        table_ptr: (B, M) int32 block ids.
        scale_ptr: (1,) float32 scale of the cache's entries, in place of `cache_scale`.
        num_reqs: B.
        max_items: of the plan.
        max_rows: query rows that a request has at most.
        table_stride: of the block table.
        lse_stride: of a head's LSEs.
        scale: factor on q.k, times log2(e), without the cache's.
        cache_scale: of the cache's entries.
        CAUSAL: 1 where rows see keys up to their own, 0 where they see all.
        PDL: launched as in `dependent`.
    """
    blocks = (max_rows + ROWS - 1) // ROWS
    part_of = tl.program_id(0) // blocks
    wait_for_earlier(PDL)
    # All at once: a record past the last is within the plan, and what it holds is not looked at.
    record = plan_ptr + _HEADER + _RECORD * part_of
    num_items = tl.load(plan_ptr)
    b = tl.load(record)
    start = tl.load(record + 1)
    end = tl.load(record + 2)
    parts = tl.load(record + 3)
    num_keys = tl.load(record + 4)
    q0 = tl.load(record + 5)
    num_rows = tl.load(record + 6) * HQ
    if part_of >= num_items:
        return
    row0 = tl.program_id(0) % blocks * ROWS
    if row0 >= num_rows:
        return

    row = row0 + tl.arange(0, ROWS)
    live = row < num_rows
    token = tl.minimum(row, num_rows - 1) // HQ
    head = row % HQ
    position = num_keys - num_rows // HQ + token
    last = tl.minimum(bounds_of(position, num_keys, False, -1, -1, 0, CAUSAL)[1], end)

    i = tl.arange(0, BN)
    dl = tl.arange(0, DLP)
    dr = tl.arange(0, DRP)
    if scale_ptr is not None:
        cache_scale = tl.load(scale_ptr)
    scale = scale * cache_scale
    q_rows = q_ptr + ((q0 + token).to(tl.int64) * Q_TOKEN + head * Q_HEAD)
    CHUNKED: tl.constexpr = q_ptr.dtype.element_ty == tl.float32
    q_latent = q_ptr
    q_rope = q_ptr
    if not CHUNKED:
        q_latent = tl.load(
            q_rows[:, None] + dl[None, :], mask=live[:, None] & (dl < DL)[None, :], other=0.0
        )
        q_rope = tl.load(
            q_rows[:, None] + DL + dr[None, :], mask=live[:, None] & (dr < DR)[None, :], other=0.0
        )
        if cache_ptr.dtype.element_ty.is_fp8() and q_latent.dtype == tl.bfloat16:
            q_latent, q_rope, scale = _halves(q_latent, q_rope, scale)

    m = row_start(ROWS)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DLP], tl.float32)
    table = table_ptr + b.to(tl.int64) * table_stride
    # The page numbers of a tile are loaded an iteration ahead: a load that waits for another would
    # halve the depth to which the compiler prefetches.
    ahead = start + i
    if latent_tiles is not None:
        ahead = start
    has_keys = (ahead >= start) & (end > start)
    page = tl.load(table + tl.minimum(ahead, num_keys - 1) // PAGE, mask=has_keys, other=0)
    whole = tl.min(last, 0)
    for j in tl.range(start, end, BN, num_stages=STAGES):
        n = j + i
        if latent_tiles is not None:
            at_row = page * (K_BLOCK // K_TOKEN) + j % PAGE
            rope = rope_tiles.load([at_row, 0])
            latent = latent_tiles.load([at_row, 0])
            page = tl.load(table + tl.minimum(j + BN, num_keys - 1) // PAGE)
        else:
            at = page.to(tl.int64) * K_BLOCK + tl.minimum(n, num_keys - 1) % PAGE * K_TOKEN
            rope = _load_rows(cache_ptr + DL, at, dr, DR, DRP)
            latent = _load_rows(cache_ptr, at, dl, DL, DLP)
            page = tl.load(table + tl.minimum(n + BN, num_keys - 1) // PAGE)
        if CHUNKED:
            latent = latent.to(q_ptr.dtype.element_ty)
            s_rope = tl.zeros([ROWS, BN], tl.float32)
            s = _chunked_logits(q_rows, live, cache_ptr + at, s_rope, DL, DLP)
            s = _chunked_logits(q_rows + DL, live, cache_ptr + at + DL, s, DR, DRP)
        else:
            latent = latent.to(q_latent.dtype)
            s = tl.dot(q_latent, tl.trans(latent))
            s_rope = tl.dot(q_rope, tl.trans(rope.to(q_latent.dtype)))
        # Not only to spare whole tiles the mask: past a branch the compiler does not see that the
        # logits feed another product, for which it would let each warp group compute all of them.
        # Both are in it, and scaled apart, since a sum of products is made one product's chain.
        if j + BN > whole:
            s = tl.where(n[None, :] < last[:, None], s, -float("inf"))
            s_rope = tl.where(n[None, :] < last[:, None], s_rope, 0.0)
        if CHUNKED:
            # The difference is rounded, and not the logits before it, whose last bits weigh more.
            top = tl.maximum(m, tl.max(s, 1) * scale)
            below = tl.zeros_like(s) - top[:, None]
            p = tl.math.exp2(tl.fma(s, tl.zeros_like(s) + scale, below))
        else:
            s = s * scale + s_rope * scale
            top = tl.maximum(m, tl.max(s, 1))
            p = tl.math.exp2(s - top[:, None])
        fade = tl.math.exp2(m - top)
        total = total * fade + tl.sum(p, 1)
        acc = tl.dot(p.to(latent.dtype), latent, acc * fade[:, None], input_precision="ieee")
        m = top
    acc = acc * cache_scale
    release_next(PDL)

    inside = live[:, None] & (dl < DL)[None, :]
    if part_ptr is not None and parts > 1:
        slot = part_of.to(tl.int64) * max_rows + row
        tl.store(part_ptr + (slot[:, None] * DL + dl[None, :]), acc, mask=inside)
        tl.store(stat_ptr + slot * 2, m, mask=live)
        tl.store(stat_ptr + slot * 2 + 1, total, mask=live)
    else:
        out, lse = finish(m, total, acc, 0.0, False)
        to = (q0 + token).to(tl.int64) * O_TOKEN + head * O_HEAD
        out = out.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + (to[:, None] + dl[None, :]), out, mask=inside)
        if lse_ptr is not None:
            tl.store(lse_ptr + head.to(tl.int64) * lse_stride + q0 + token, lse, mask=live)


def variants(arch: str) -> Iterator[KernelVariant]:
    """Yield how the kernel is launched on an architecture."""
    yield from mla_decode_variants(mla_decode, arch)
