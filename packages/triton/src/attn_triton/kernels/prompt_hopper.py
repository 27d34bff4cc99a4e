"""Attention of long prompts on Hopper, in Triton's lower-level language, Gluon.

The same work as `prompt`, in the same run-time arguments. What is different is said by hand, since
the compiler does not find it: two groups of four warps have 64 query rows each, and a fifth warp
has keys and values copied to shared memory ahead of them. In a group the products of one tile with
the queries and the weighted values of the tile before it are both in flight while weights are
computed, and one group's products run under the other's exponentials.

A program takes one block of query tokens of one head after another. Tiles that need a mask come
first, so that the loop over the others has none; sums do not depend on the order.

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

from attn_triton.kernels.blocks import HEADER
from attn_triton.kernels.prompt_items import (
    FIELDS,
    item_of,
    last_seen,
    post,
    read,
    tile_at,
    tiles_of,
)
from attn_triton.kernels.softmax_hopper import soften
from attn_triton.prompt_tiles import HOPPER_PIECE
from attn_triton.prompt_variants import hopper_prompt_variants
from attn_triton.variants import KernelVariant

__all__ = ["prompt_hopper", "variants"]

_HEADER = gl.constexpr(HEADER)
_LN2 = gl.constexpr(0.6931471805599453)
_LOG2E = gl.constexpr(1.4426950408889634)
_PIECE = gl.constexpr(HOPPER_PIECE)
_NOTHING = gl.constexpr(-1e30)  # a maximum below all logits whose difference to -inf is no NaN
_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # renamed in Triton 3.7


@gluon.jit
def _copy_pieces(
    desc, rows, column, full, tiles, stage, is_needed, BN: gl.constexpr, WIDTH: gl.constexpr
):
    """Have a tile copied by squares, of which a column of BN rows follows the one before it."""
    DOWN: gl.constexpr = BN // _PIECE
    ACROSS: gl.constexpr = WIDTH // _PIECE
    COUNT: gl.constexpr = tiles.shape[0] * DOWN * ACROSS
    pieces = tiles._reinterpret(tiles.dtype, [COUNT, _PIECE, _PIECE], desc.layout)
    for piece in gl.static_range(DOWN):
        for panel in gl.static_range(ACROSS):
            to = pieces.index((stage * ACROSS + panel) * DOWN + piece)
            at = [rows[piece], column + panel * _PIECE]
            tma.async_copy_global_to_shared(desc, at, full, to, pred=is_needed)


@gluon.jit
def _produce(  # size: one loop
    descriptors, buffers, barriers, batch, table_ptr, table_stride, causal_ptr, num_items,
    HQ: gl.constexpr, HK: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, BLOCK: gl.constexpr,
    BN: gl.constexpr, STAGES: gl.constexpr, CONTEXT: gl.constexpr, FRESH: gl.constexpr,
    PAGE: gl.constexpr, Q_HEAD: gl.constexpr, K_ROWS: gl.constexpr, K_HEAD_ROWS: gl.constexpr,
    K_HEAD: gl.constexpr, V_ROWS: gl.constexpr, V_HEAD_ROWS: gl.constexpr, V_HEAD: gl.constexpr,
    NEW_K_HEAD: gl.constexpr, NEW_V_HEAD: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """Choose items, tell the groups, and have queries, keys and values copied to their buffers."""
    q_desc, k_desc, v_desc, new_k_desc, new_v_desc = descriptors
    queries, keys, values, mail, _outs = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty, mail_full, mail_empty = barriers
    blocks_ptr, lens_ptr = batch[0], batch[1]
    count = 0
    trip = 0
    place = gl.program_id(0)
    while place < num_items:
        item = item_of(place, batch, causal_ptr, HQ, FRESH, CAUSAL)
        b, is_causal, head, m0, q0, num_rows, num_keys, split = item
        tiles = tiles_of(item, 2 * BLOCK, BN, CONTEXT, FRESH, CAUSAL)
        kv_head = head // (HQ // HK)
        new_row = q0 - split
        if FRESH == 2:
            new_row = gl.load(lens_ptr + b)
        old_k_row = kv_head * K_HEAD_ROWS
        old_v_row = kv_head * V_HEAD_ROWS
        if CONTEXT == 2:
            old_k_row = gl.load(blocks_ptr + _HEADER + b)
            old_v_row = old_k_row
        slot = trip & 1
        mbarrier.wait(mail_empty.index(slot), (trip >> 1 & 1) ^ 1)
        post(mail, slot, tiles + (is_causal, head, m0, q0, num_rows, num_keys, split))  # noqa: RUF005
        mbarrier.arrive(mail_full.index(slot))
        mbarrier.wait(q_empty, (trip & 1) ^ 1)
        mbarrier.expect(q_full, 2 * q_desc.block_type.nbytes)
        for part in gl.static_range(2):
            at = [q0 + m0 + part * BLOCK, head * Q_HEAD]
            tma.async_copy_global_to_shared(q_desc, at, q_full, queries.index(part))
        for i in range(tiles[0] + tiles[2]):
            stage = count % STAGES
            phase = (count // STAGES & 1) ^ 1
            is_old, start = tile_at(i, tiles, split, BN, CONTEXT, FRESH)
            k_rows, v_rows = (), ()
            if CONTEXT == 1:
                table = table_ptr + b.to(gl.int64) * table_stride
                for piece in gl.static_range(BN // _PIECE):
                    n = start + piece * _PIECE
                    page = gl.load(table + n // PAGE, mask=is_old & (n < split), other=0)
                    k_row = page * K_ROWS + old_k_row + n % PAGE
                    v_row = page * V_ROWS + old_v_row + n % PAGE
                    k_rows = k_rows + (k_row,)  # type: ignore[assignment]  # noqa: RUF005
                    v_rows = v_rows + (v_row,)  # type: ignore[assignment]  # noqa: RUF005
            mbarrier.wait(k_empty.index(stage), phase)
            k_at = k_full.index(stage)
            key = keys.index(stage)
            mbarrier.expect(k_at, BN * D * 2)
            if CONTEXT == 1:
                _copy_pieces(k_desc, k_rows, kv_head * K_HEAD, k_at, keys, stage, is_old, BN, D)
            if CONTEXT == 2:
                at = [old_k_row + start, kv_head * K_HEAD]
                tma.async_copy_global_to_shared(k_desc, at, k_at, key, pred=is_old)
            if FRESH > 0:
                at = [new_row + start, kv_head * NEW_K_HEAD]
                tma.async_copy_global_to_shared(new_k_desc, at, k_at, key, pred=not is_old)
            mbarrier.wait(v_empty.index(stage), phase)
            v_at = v_full.index(stage)
            value = values.index(stage)
            mbarrier.expect(v_at, BN * DV * 2)
            if CONTEXT == 1:
                _copy_pieces(v_desc, v_rows, kv_head * V_HEAD, v_at, values, stage, is_old, BN, DV)
            if CONTEXT == 2:
                at = [old_v_row + start, kv_head * V_HEAD]
                tma.async_copy_global_to_shared(v_desc, at, v_at, value, pred=is_old)
            if FRESH > 0:
                at = [new_row + start, kv_head * NEW_V_HEAD]
                tma.async_copy_global_to_shared(new_v_desc, at, v_at, value, pred=not is_old)
            count += 1
        trip += 1
        place = gl.atomic_add(blocks_ptr + 1, 1) + gl.num_programs(0)
    slot = trip & 1
    mbarrier.wait(mail_empty.index(slot), (trip >> 1 & 1) ^ 1)
    post(mail, slot, (0, 0, 0, 0))
    mbarrier.arrive(mail_full.index(slot))
    if gl.atomic_add(blocks_ptr + 2, 1) == gl.num_programs(0) - 1:
        gl.store(blocks_ptr + 1, 0)  # the last program leaves the counters as they were
        gl.store(blocks_ptr + 2, 0)


@gluon.jit
def _hide(s, start, stop, last):
    """Return logits of the tile at `start`, those of keys from `last` or `stop` on at -inf."""
    n = start + gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))
    seen = n[None, :] < gl.minimum(last, stop)[:, None]
    return gl.where(seen, s, -float("inf"))


@gluon.jit
def _await(full, count, STAGES: gl.constexpr):
    """Wait until the buffer of the tile `count` of all items is full."""
    mbarrier.wait(full.index(count % STAGES), count // STAGES & 1)


@gluon.jit
def _queue(q, w, acc, none, keys, values, k_full, v_full, count, STAGES: gl.constexpr):
    """Queue the logits of the next tile and the weighted values of this one, and return both."""
    _await(k_full, count + 1, STAGES)
    key = keys.index((count + 1) % STAGES).permute((1, 0))
    s = warpgroup_mma(q, key, none, use_acc=False, is_async=True)
    _await(v_full, count, STAGES)
    acc = warpgroup_mma(w, values.index(count % STAGES), acc, is_async=True)
    return s, acc


@gluon.jit
def _clean(values, full, count, rows, BN: gl.constexpr, DV: gl.constexpr, STAGES: gl.constexpr):
    """Zero a tile's values from `rows` on: memory past a sequence may hold anything.

    Both groups do, and write the same.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DV, DV // 8], [4, 1], [1, 0])
    if rows < BN:
        _await(full, count, STAGES)
        value = values.index(count % STAGES)
        v = value.load(LAYOUT)
        row = gl.arange(0, BN, gl.SliceLayout(1, LAYOUT))
        value.store(gl.where((row < rows)[:, None], v, 0.0))
        fence_async_shared()
        _barrier()


@gluon.jit
def _tiles(mail, slot):
    """Return an item's tiles, as `tiles_of` does; none at the end of all."""
    return read(mail, slot, 0), read(mail, slot, 1), read(mail, slot, 2), read(mail, slot, 3)


@gluon.jit
def _consume(  # size: one algorithm
    out_ptr, lse_ptr, sinks_ptr, k_scale_ptr, v_scale_ptr, buffers, barriers, lse_stride, scale,
    v_scale,
    PART: gl.constexpr, HQ: gl.constexpr, HK: gl.constexpr, D: gl.constexpr, DV: gl.constexpr,
    BLOCK: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, CONTEXT: gl.constexpr,
    FRESH: gl.constexpr, O_TOKEN: gl.constexpr, O_HEAD: gl.constexpr, CAUSAL: gl.constexpr,
    SCALES: gl.constexpr, STAGED: gl.constexpr,
):  # fmt: skip
    """Attend for the rows of one group, for one item after another."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DV, DV // 8], [4, 1], [1, 0])
    S_ROW: gl.constexpr = gl.SliceLayout(1, S)
    ACC_ROW: gl.constexpr = gl.SliceLayout(1, ACC)
    # More than one tile may need a mask
    HAS_SECOND: gl.constexpr = CONTEXT > 0 or (CAUSAL > 0 and (FRESH == 2 or BN < 2 * BLOCK))
    queries, keys, values, mail, outs = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty, mail_full, mail_empty = barriers
    dtype: gl.constexpr = keys.dtype
    q = queries.index(PART)
    none = gl.zeros([BLOCK, BN], gl.float32, S)
    count = 0
    trip = 0
    if SCALES == 1:
        scale = scale * gl.load(k_scale_ptr)
        v_scale = v_scale * gl.load(v_scale_ptr)
    mbarrier.wait(mail_full.index(0), 0)
    tiles = _tiles(mail, 0)
    while tiles[0] + tiles[2] > 0:
        slot = trip & 1
        is_causal = read(mail, slot, 4)
        head = read(mail, slot, 5)
        m0 = read(mail, slot, 6)
        q0 = read(mail, slot, 7)
        num_rows = read(mail, slot, 8)
        num_keys = read(mail, slot, 9)
        split = read(mail, slot, 10)
        mbarrier.arrive(mail_empty.index(slot))
        num_tiles = tiles[0] + tiles[2]
        row = m0 + PART * BLOCK + gl.arange(0, BLOCK, S_ROW)
        last = last_seen(num_keys - num_rows + row, num_keys, is_causal, CAUSAL)
        factor = scale
        v_factor = v_scale
        if SCALES == 2:
            factor = scale * gl.load(k_scale_ptr + head // (HQ // HK))
            v_factor = v_scale * gl.load(v_scale_ptr + head // (HQ // HK))

        mbarrier.wait(q_full, trip & 1)
        mbarrier.wait(k_full.index(count % STAGES), count // STAGES & 1)
        key = keys.index(count % STAGES).permute((1, 0))
        s = warpgroup_mma(q, key, none, use_acc=False, is_async=True)
        is_old, start = tile_at(0, tiles, split, BN, CONTEXT, FRESH)
        stop = gl.where(is_old, split, num_keys)
        s = warpgroup_mma_wait(0, [s])
        mbarrier.arrive(k_empty.index(count % STAGES))
        m = gl.full([BLOCK], _NOTHING, gl.float32, S_ROW)
        total = gl.zeros([BLOCK], gl.float32, S_ROW)
        p, fade, m, total = soften(_hide(s, start, stop, last), m, total, factor)
        w = gl.convert_layout(p.to(dtype), WEIGHTS)
        _clean(values, v_full, count, stop - start, BN, DV, STAGES)
        acc = gl.zeros([BLOCK, DV], gl.float32, ACC)
        masked = 1
        if HAS_SECOND:
            masked = gl.maximum(num_tiles - tiles[1] - tiles[3], 1)
            for i in range(1, masked):
                s, acc = _queue(q, w, acc, none, keys, values, k_full, v_full, count, STAGES)
                s = warpgroup_mma_wait(1, [s])
                mbarrier.arrive(k_empty.index((count + 1) % STAGES))
                is_old, start = tile_at(i, tiles, split, BN, CONTEXT, FRESH)
                stop = gl.where(is_old, split, num_keys)
                p, fade, m, total = soften(_hide(s, start, stop, last), m, total, factor)
                acc = warpgroup_mma_wait(0, [acc])
                mbarrier.arrive(v_empty.index(count % STAGES))
                w = gl.convert_layout(p.to(dtype), WEIGHTS)
                acc = acc * gl.convert_layout(fade, ACC_ROW)[:, None]
                count += 1
                _clean(values, v_full, count, stop - start, BN, DV, STAGES)
        for _i in range(masked, num_tiles):
            s, acc = _queue(q, w, acc, none, keys, values, k_full, v_full, count, STAGES)
            s = warpgroup_mma_wait(1, [s])
            mbarrier.arrive(k_empty.index((count + 1) % STAGES))
            p, fade, m, total = soften(s, m, total, factor)
            acc = warpgroup_mma_wait(0, [acc])
            mbarrier.arrive(v_empty.index(count % STAGES))
            w = gl.convert_layout(p.to(dtype), WEIGHTS)
            acc = acc * gl.convert_layout(fade, ACC_ROW)[:, None]
            count += 1
        if STAGED:
            mbarrier.arrive(q_empty)
        _await(v_full, count, STAGES)
        acc = warpgroup_mma(w, values.index(count % STAGES), acc, is_async=True)
        acc = warpgroup_mma_wait(0, [acc])
        mbarrier.arrive(v_empty.index(count % STAGES))
        count += 1

        if sinks_ptr is not None:
            extra = gl.load(sinks_ptr + head) * _LOG2E
            top = gl.maximum(m, extra)
            fade = gl.exp2(m - top)
            total = total * fade + gl.exp2(extra - top)
            acc = acc * gl.convert_layout(fade, ACC_ROW)[:, None]
            m = top
        is_empty = total == 0
        whole = gl.where(is_empty, 1.0, total)
        acc = acc * gl.convert_layout(v_factor / whole, ACC_ROW)[:, None]
        # By way of shared memory: a warp then writes whole rows.
        staged = outs.index(PART)
        staged.store(acc.to(dtype))
        _barrier()
        r = m0 + PART * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(1, ROWS))
        d = gl.arange(0, DV, gl.SliceLayout(0, ROWS))
        to = out_ptr + head * O_HEAD + (q0 + r).to(gl.int64)[:, None] * O_TOKEN + d[None, :]
        gl.store(to, staged.load(ROWS), mask=(r < num_rows)[:, None])
        if not STAGED:
            fence_async_shared()
            mbarrier.arrive(q_empty)
        if lse_ptr is not None:
            lse = gl.where(is_empty, -float("inf"), (m + gl.log2(whole)) * _LN2)
            gl.store(lse_ptr + head.to(gl.int64) * lse_stride + q0 + row, lse, mask=row < num_rows)
        trip += 1
        mbarrier.wait(mail_full.index(trip & 1), trip >> 1 & 1)
        tiles = _tiles(mail, trip & 1)


@gluon.jit(do_not_specialize=["num_reqs", "section_heads", "table_stride", "lse_stride"])
def prompt_hopper(  # size: one algorithm
    q_desc,
    k_desc,
    v_desc,
    new_k_desc,
    new_v_desc,
    out_ptr,
    lse_ptr,
    blocks_ptr,
    table_ptr,
    lens_ptr,
    query_starts,
    causal_ptr,
    sinks_ptr,
    k_scale_ptr,
    v_scale_ptr,
    num_reqs,
    section_heads,
    table_stride,
    lse_stride,
    scale,
    v_scale,
    cap,
    HQ: gl.constexpr,
    HK: gl.constexpr,
    D: gl.constexpr,
    DV: gl.constexpr,
    BLOCK: gl.constexpr,
    BN: gl.constexpr,
    STAGES: gl.constexpr,
    CONTEXT: gl.constexpr,
    FRESH: gl.constexpr,
    PAGE: gl.constexpr,
    Q_HEAD: gl.constexpr,
    O_TOKEN: gl.constexpr,
    O_HEAD: gl.constexpr,
    K_ROWS: gl.constexpr,
    K_HEAD_ROWS: gl.constexpr,
    K_HEAD: gl.constexpr,
    V_ROWS: gl.constexpr,
    V_HEAD_ROWS: gl.constexpr,
    V_HEAD: gl.constexpr,
    NEW_K_HEAD: gl.constexpr,
    NEW_V_HEAD: gl.constexpr,
    CAUSAL: gl.constexpr,
    SCALES: gl.constexpr,
    STAGED: gl.constexpr,
):
    """Attend for blocks of query tokens over all keys that they see, as `prompt`.

    Launched with 4 warps, of which there are 12 then, and with as many programs as run at once or
    more. BLOCK is 64, a program's block of the plan 2 x BLOCK; tiles of BN keys have STAGES
    buffers.
    """
    dtype: gl.constexpr = q_desc.dtype
    K: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BN, D], dtype)
    V: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BN, DV], dtype)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    queries = gl.allocate_shared_memory(dtype, [2, BLOCK, D], q_desc.layout)
    keys = gl.allocate_shared_memory(dtype, [STAGES, BN, D], K)
    values = gl.allocate_shared_memory(dtype, [STAGES, BN, DV], V)
    outs = queries
    if STAGED:
        outs = gl.allocate_shared_memory(dtype, [2, BLOCK, DV], V)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    mail = gl.allocate_shared_memory(gl.int32, [2 * FIELDS, 1], PLAIN)
    q_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    mail_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    mail_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=2)
    for i in gl.static_range(2):
        mbarrier.init(mail_full.index(i), count=1)
        mbarrier.init(mail_empty.index(i), count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=2)
    fence_async_shared()
    num_blocks = gl.load(blocks_ptr)
    num_items = num_blocks * HQ
    batch = (blocks_ptr, lens_ptr, query_starts, num_blocks, num_reqs, section_heads)
    buffers = (queries, keys, values, mail, outs)
    barriers = (q_full, q_empty, k_full, k_empty, v_full, v_empty, mail_full, mail_empty)
    descriptors = (q_desc, k_desc, v_desc, new_k_desc, new_v_desc)
    gl.warp_specialize(
        [
            (_consume, (
                out_ptr, lse_ptr, sinks_ptr, k_scale_ptr, v_scale_ptr, buffers, barriers,
                lse_stride, scale, v_scale, 0, HQ, HK, D, DV, BLOCK,
                BN, STAGES, CONTEXT, FRESH, O_TOKEN, O_HEAD, CAUSAL, SCALES, STAGED,
            )),
            (_consume, (
                out_ptr, lse_ptr, sinks_ptr, k_scale_ptr, v_scale_ptr, buffers, barriers,
                lse_stride, scale, v_scale, 1, HQ, HK, D, DV, BLOCK,
                BN, STAGES, CONTEXT, FRESH, O_TOKEN, O_HEAD, CAUSAL, SCALES, STAGED,
            )),
            (_produce, (
                descriptors, buffers, barriers, batch, table_ptr, table_stride, causal_ptr,
                num_items, HQ, HK, D, DV, BLOCK, BN, STAGES, CONTEXT, FRESH, PAGE, Q_HEAD, K_ROWS,
                K_HEAD_ROWS, K_HEAD, V_ROWS, V_HEAD_ROWS, V_HEAD, NEW_K_HEAD, NEW_V_HEAD, CAUSAL,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def variants(arch: str) -> Iterator[KernelVariant]:
    """Yield how the kernel is launched on an architecture."""
    yield from hopper_prompt_variants(prompt_hopper, arch)
