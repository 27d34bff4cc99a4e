"""Decode over latents for many rows on Hopper, in Triton's lower-level language, Gluon.

The same work as `mla_decode`, in the same arguments. What is different is said by hand, since the
compiler does not find it: both warp groups share each product (it gives each the whole of Q.K where
the result feeds another product), Q.K of rope part and latent are one chain, and a tile's buffer is
filled again as soon as its weighted sum is done.

Where Triton has no such language, or another form of it, the module does not import.
"""

from __future__ import annotations

from collections.abc import Iterator

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from attn_triton.kernels.plan import HEADER, RECORD
from attn_triton.latent_variants import hopper_variants
from attn_triton.variants import KernelVariant

__all__ = ["mla_decode_hopper", "variants"]

_HEADER = gl.constexpr(HEADER)
_RECORD = gl.constexpr(RECORD)
_LN2 = gl.constexpr(0.6931471805599453)
_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # renamed in Triton 3.7


@gluon.jit
def _fill(latent_tiles, rope_tiles, at_row, arrived, latent, rope, more):
    """Have a tile of entries copied to its buffers, where there is one."""
    tma.async_copy_global_to_shared(rope_tiles, [at_row, 0], arrived, rope, pred=more)
    tma.async_copy_global_to_shared(latent_tiles, [at_row, 0], arrived, latent, pred=more)


@gluon.jit
def _query_rows(q_ptr, at, live, begin, WIDTH: gl.constexpr, PADDED: gl.constexpr):
    """Return columns of query rows, zero past WIDTH and in rows that are not live."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    d = gl.arange(0, PADDED, gl.SliceLayout(0, layout))
    inside = live[:, None] & (d < WIDTH)[None, :]
    return gl.load(q_ptr + (at[:, None] + begin + d[None, :]), mask=inside, other=0.0)


@gluon.jit
def _logits(q_latent, q_rope, latents, ropes, arrived, nothing, i, STAGES: gl.constexpr):
    """Wait for tile `i` and begin its products with the queries, two groups of instructions."""
    buffer = i % STAGES
    mbarrier.wait(arrived.index(buffer), i // STAGES & 1)
    rope = ropes.index(buffer).permute((1, 0))
    latent = latents.index(buffer).permute((1, 0))
    s = warpgroup_mma(q_rope, rope, nothing, use_acc=False, is_async=True)
    return warpgroup_mma(q_latent, latent, s, is_async=True)


@gluon.jit
def _soften(s, m, sums, weights, scale, n, last, is_masked):
    """Store a tile's weights; return new maxima, sums by column, and factors of what was before."""
    s = s * scale
    if is_masked:
        s = gl.where(n[None, :] < last[:, None], s, -float("inf"))
    top = gl.maximum(m, gl.max(s, 1))
    p = gl.exp2(s - top[:, None])
    fade = gl.exp2(m - top)
    weights.store(p.to(weights.dtype))
    return top, sums * fade[:, None] + p, fade


@gluon.jit(
    do_not_specialize=["num_reqs", "max_items", "max_rows", "table_stride", "lse_stride"],
)
def mla_decode_hopper(  # size: one algorithm
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
    HQ: gl.constexpr,
    DL: gl.constexpr,
    DR: gl.constexpr,
    DLP: gl.constexpr,
    DRP: gl.constexpr,
    ROWS: gl.constexpr,
    BN: gl.constexpr,
    STAGES: gl.constexpr,
    PAGE: gl.constexpr,
    Q_TOKEN: gl.constexpr,
    Q_HEAD: gl.constexpr,
    O_TOKEN: gl.constexpr,
    O_HEAD: gl.constexpr,
    K_BLOCK: gl.constexpr,
    K_TOKEN: gl.constexpr,
    CAUSAL: gl.constexpr,
):
    """Attend to one part of a request's latents for up to ROWS query rows, as `mla_decode`.

    Launched with 8 warps; ROWS is 64, tiles arrive by descriptors, the cache has the queries'
    dtype. STAGES buffers of entries take turns.
    """
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, BN // 2, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, DLP // 2, 16])
    S_ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    O_ROW: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    Q_ROW: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0]))
    dtype: gl.constexpr = latent_tiles.dtype
    Q_LATENT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, DLP], dtype)
    Q_ROPE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, DRP], dtype)
    WEIGHTS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BN], dtype)
    BYTES: gl.constexpr = latent_tiles.block_type.nbytes + rope_tiles.block_type.nbytes

    blocks = (max_rows + ROWS - 1) // ROWS
    part_of = gl.program_id(0) // blocks
    record = plan_ptr + _HEADER + _RECORD * part_of
    num_items = gl.load(plan_ptr)
    b = gl.load(record)
    start = gl.load(record + 1)
    end = gl.load(record + 2)
    parts = gl.load(record + 3)
    num_keys = gl.load(record + 4)
    q0 = gl.load(record + 5)
    num_rows = gl.load(record + 6) * HQ
    if part_of >= num_items:
        return
    row0 = gl.program_id(0) % blocks * ROWS
    if row0 >= num_rows:
        return

    # The first tiles are on their way before anything else is read.
    table = table_ptr + b.to(gl.int64) * table_stride
    latents = gl.allocate_shared_memory(dtype, [STAGES, BN, DLP], latent_tiles.layout)
    ropes = gl.allocate_shared_memory(dtype, [STAGES, BN, DRP], rope_tiles.layout)
    weights = gl.allocate_shared_memory(dtype, [ROWS, BN], WEIGHTS)
    arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for k in gl.static_range(STAGES):
        mbarrier.init(arrived.index(k), count=1)
    tiles = (end - start + BN - 1) // BN
    last_page = (num_keys - 1) // PAGE
    for k in gl.static_range(STAGES):
        at = start + k * BN
        page = gl.load(table + gl.minimum(at // PAGE, last_page), mask=k < tiles, other=0)
        at_row = page * (K_BLOCK // K_TOKEN) + at % PAGE
        mbarrier.expect(arrived.index(k), BYTES, pred=k < tiles)
        _fill(
            latent_tiles, rope_tiles, at_row,
            arrived.index(k), latents.index(k), ropes.index(k), k < tiles,
        )  # fmt: skip
    at = start + STAGES * BN
    page = gl.load(table + gl.minimum(at // PAGE, last_page), mask=tiles > 0, other=0)

    r = row0 + gl.arange(0, ROWS, Q_ROW)
    live = r < num_rows
    q_at = (q0 + gl.minimum(r, num_rows - 1) // HQ).to(gl.int64) * Q_TOKEN + r % HQ * Q_HEAD
    q = _query_rows(q_ptr, q_at, live, 0, DL, DLP)
    q_latent = gl.allocate_shared_memory(dtype, [ROWS, DLP], Q_LATENT, q)
    q = _query_rows(q_ptr, q_at, live, DL, DR, DRP)
    q_rope = gl.allocate_shared_memory(dtype, [ROWS, DRP], Q_ROPE, q)
    fence_async_shared()
    if scale_ptr is not None:
        cache_scale = gl.load(scale_ptr)
    scale = scale * cache_scale

    row = row0 + gl.arange(0, ROWS, S_ROW)
    last = gl.minimum(row * 0 + num_keys, end)
    if CAUSAL == 1:
        token = gl.minimum(row, num_rows - 1) // HQ
        last = gl.minimum(num_keys - num_rows // HQ + token + 1, end)
    whole = gl.min(last, 0)
    n = gl.arange(0, BN, gl.SliceLayout(0, S_LAYOUT))
    m = gl.full([ROWS], -1e30, gl.float32, S_ROW)
    sums = gl.zeros([ROWS, BN], gl.float32, S_LAYOUT)  # by column, added up at the end
    nothing = gl.zeros([ROWS, BN], gl.float32, S_LAYOUT)
    acc = gl.zeros([ROWS, DLP], gl.float32, O_LAYOUT)
    if tiles > 0:
        s = _logits(q_latent, q_rope, latents, ropes, arrived, nothing, 0, STAGES)
        s = warpgroup_mma_wait(0, [s])
        j = start
        m, sums, fade = _soften(s, m, sums, weights, scale, j + n, last, j + BN > whole)
        for i in range(tiles - 1):
            # The weighted sum of one tile and the logits of the next are queued together: while
            # the tensor cores work on the latter, the tile of the former is filled again.
            buffer = i % STAGES
            fence_async_shared()
            _barrier()
            acc = warpgroup_mma(weights, latents.index(buffer), acc, is_async=True)
            s = _logits(q_latent, q_rope, latents, ropes, arrived, nothing, i + 1, STAGES)
            acc = warpgroup_mma_wait(2, [acc])
            more = i + STAGES < tiles
            at_row = page * (K_BLOCK // K_TOKEN) + at % PAGE
            mbarrier.expect(arrived.index(buffer), BYTES, pred=more)
            _barrier()  # both warp groups have read the tile and its weights
            _fill(
                latent_tiles, rope_tiles, at_row,
                arrived.index(buffer), latents.index(buffer), ropes.index(buffer), more,
            )  # fmt: skip
            at += BN
            page = gl.load(table + gl.minimum(at // PAGE, last_page))
            s = warpgroup_mma_wait(0, [s])
            j += BN
            m, sums, fade = _soften(s, m, sums, weights, scale, j + n, last, j + BN > whole)
            acc = acc * gl.convert_layout(fade, O_ROW)[:, None]
        fence_async_shared()
        _barrier()
        acc = warpgroup_mma(weights, latents.index((tiles - 1) % STAGES), acc, is_async=True)
        acc = warpgroup_mma_wait(0, [acc])
    acc = acc * cache_scale
    total = gl.convert_layout(gl.sum(sums, 1), O_ROW)
    m_out = gl.convert_layout(m, O_ROW)

    r_out = row0 + gl.arange(0, ROWS, O_ROW)
    is_live = r_out < num_rows
    d = gl.arange(0, DLP, gl.SliceLayout(0, O_LAYOUT))
    inside = is_live[:, None] & (d < DL)[None, :]
    is_part = False
    if part_ptr is not None:
        is_part = parts > 1
        if is_part:
            slot = part_of.to(gl.int64) * max_rows + r_out
            gl.store(part_ptr + (slot[:, None] * DL + d[None, :]), acc, mask=inside)
            gl.store(stat_ptr + slot * 2, m_out, mask=is_live)
            gl.store(stat_ptr + slot * 2 + 1, total, mask=is_live)
    if not is_part:
        is_empty = total == 0
        divisor = gl.where(is_empty, 1.0, total)
        t_out = q0 + gl.minimum(r_out, num_rows - 1) // HQ
        h_out = r_out % HQ
        to = t_out.to(gl.int64) * O_TOKEN + h_out * O_HEAD
        out = (acc / divisor[:, None]).to(out_ptr.dtype.element_ty)
        gl.store(out_ptr + (to[:, None] + d[None, :]), out, mask=inside)
        if lse_ptr is not None:
            lse = gl.where(is_empty, -float("inf"), (m_out + gl.log2(divisor)) * _LN2)
            gl.store(lse_ptr + h_out.to(gl.int64) * lse_stride + t_out, lse, mask=is_live)


def variants(arch: str) -> Iterator[KernelVariant]:
    """Yield how the kernel is launched on an architecture."""
    yield from hopper_variants(mla_decode_hopper, arch)
