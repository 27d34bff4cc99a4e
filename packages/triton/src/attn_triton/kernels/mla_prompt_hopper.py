"""Prefill over latents on Hopper, in Triton's lower-level language, Gluon.

Expanded heads are ordinary ones but for two things: keys are wider than values (128 + 64 and 128),
and their last columns, the rope part, are the same for all heads. These are read apart, from the
columns of whole keys or from a tensor that all heads share.

A program has three parts: two groups of four warps with 64 query rows each, and a warp that has
tiles of keys and values copied to shared memory ahead of them. In a group the products of a tile
with the queries and the weighted values of the tile before it are both in flight while weights are
computed, and one group's products run under the other's exponentials. Of a request's tiles the last
comes first: those that need a mask then stand before the loop without one.

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
from attn_triton.kernels.softmax_hopper import soften
from attn_triton.mla_prompt_tiles import GROUP_ROWS
from attn_triton.mla_prompt_variants import mla_prompt_variants
from attn_triton.variants import KernelVariant

__all__ = ["mla_prompt_hopper", "variants"]

_HEADER = gl.constexpr(HEADER)
_ROWS = gl.constexpr(GROUP_ROWS)
_LN2 = gl.constexpr(0.6931471805599453)
_NOTHING = gl.constexpr(-1e30)  # a maximum below all logits whose difference to -inf is no NaN
_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # renamed in Triton 3.7


@gluon.jit
def _trips(num_items):
    """Return how many items a program takes; they are dealt forth and back, the longest first."""
    programs = gl.num_programs(0)
    trips = num_items // programs
    place = gl.program_id(0)
    place = gl.where(trips % 2 == 1, programs - 1 - place, place)
    return gl.where(place < num_items % programs, trips + 1, trips)


@gluon.jit
def _item(trip, batch, BN: gl.constexpr, CAUSAL: gl.constexpr):
    """Return head, first query, rows left, first key, keys, keys before the rows, and tiles.

    There is at least one tile: a hidden one is simpler than none.
    """
    blocks_ptr, query_starts, key_starts, num_blocks, num_reqs, section_heads = batch
    programs = gl.num_programs(0)
    place = gl.program_id(0)
    place = trip * programs + gl.where(trip % 2 == 1, programs - 1 - place, place)
    in_section = num_blocks * section_heads
    rest = place % in_section
    head = place // in_section * section_heads + rest % section_heads
    record = blocks_ptr + _HEADER + num_reqs + 2 * (rest // section_heads)
    request = gl.load(record)
    row0 = gl.load(record + 1)
    start = gl.load(query_starts + request)
    rows = gl.load(query_starts + request + 1) - start
    key0 = gl.load(key_starts + request)
    keys = gl.load(key_starts + request + 1) - key0
    end = keys
    if CAUSAL:
        end = gl.minimum(keys - rows + row0 + 2 * _ROWS, keys)
    tiles = gl.maximum((end + BN - 1) // BN, 1)
    return head, start + row0, rows - row0, key0, keys, keys - rows + row0, tiles


@gluon.jit
def _produce(
    descriptors, queries, keys, values, barriers, batch, num_items,
    BN: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
    Q_HEAD: gl.constexpr, K_HEAD: gl.constexpr, R_HEAD: gl.constexpr,
    V_HEAD: gl.constexpr,
):  # fmt: skip
    """Have queries, keys and values copied to their buffers, for one item after another."""
    q_tiles, q_rope_tiles, k_tiles, rope_tiles, v_tiles = descriptors
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    q, q_rope = queries
    k, rope = keys
    NOPE: gl.constexpr = q_tiles.block_shape[1]
    Q_BYTES: gl.constexpr = 2 * (q_tiles.block_type.nbytes + q_rope_tiles.block_type.nbytes)
    K_BYTES: gl.constexpr = k_tiles.block_type.nbytes + rope_tiles.block_type.nbytes
    count = 0
    for trip in range(_trips(num_items)):
        head, query, _, key0, _, _, tiles = _item(trip, batch, BN, CAUSAL)
        for i in range(tiles):
            stage = count % STAGES
            phase = (count // STAGES & 1) ^ 1
            at = key0 + (tiles - 1 - i) * BN
            mbarrier.wait(k_empty.index(stage), phase)
            arrived = k_full.index(stage)
            mbarrier.expect(arrived, K_BYTES)
            place = [at, head * K_HEAD]
            tma.async_copy_global_to_shared(k_tiles, place, arrived, k.index(stage))
            place = [at, head * R_HEAD]
            tma.async_copy_global_to_shared(rope_tiles, place, arrived, rope.index(stage))
            if i == 0:  # behind the first keys, which have room before the last output is written
                mbarrier.wait(q_empty, (trip & 1) ^ 1)
                mbarrier.expect(q_full, Q_BYTES)
                for part in gl.static_range(2):
                    place = [query + part * _ROWS, head * Q_HEAD]
                    tma.async_copy_global_to_shared(q_tiles, place, q_full, q.index(part))
                    place = [query + part * _ROWS, head * Q_HEAD + NOPE]
                    tma.async_copy_global_to_shared(q_rope_tiles, place, q_full, q_rope.index(part))
            mbarrier.wait(v_empty.index(stage), phase)
            arrived = v_full.index(stage)
            mbarrier.expect(arrived, v_tiles.block_type.nbytes)
            place = [at, head * V_HEAD]
            tma.async_copy_global_to_shared(v_tiles, place, arrived, values.index(stage))
            count += 1


@gluon.jit
def _logits(q, q_rope, keys, stage, none):
    """Begin the products of a tile with the queries, two groups of instructions."""
    k, rope = keys
    s = warpgroup_mma(q_rope, rope.index(stage).permute((1, 0)), none, use_acc=False, is_async=True)
    return warpgroup_mma(q, k.index(stage).permute((1, 0)), s, is_async=True)


@gluon.jit
def _hide(s, start, last):
    """Return logits of the tile at `start`, those of keys from `last` on at -inf."""
    n = start + gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))
    return gl.where(n[None, :] < last[:, None], s, -float("inf"))


@gluon.jit
def _step(
    q, q_rope, keys, values, barriers, count, more, m, total, acc, w, none, scale, start, last,
    STAGES: gl.constexpr, MASK: gl.constexpr,
):  # fmt: skip
    """Attend to the tile after the one whose weights are `w`, and add that one's values."""
    _, _, k_full, k_empty, v_full, v_empty = barriers
    stage = (count + 1) % STAGES
    before = count % STAGES
    s = _logits(q, q_rope, keys, stage, none)
    mbarrier.wait(v_full.index(before), count // STAGES & 1)
    acc = warpgroup_mma(w, values.index(before), acc, is_async=True)
    s = warpgroup_mma_wait(1, [s])
    mbarrier.arrive(k_empty.index(stage))
    if MASK:
        s = _hide(s, start, last)
    p, fade, m, total = soften(s, m, total, scale)
    # Waited for here and not where it is read: the branch keeps the assembler from moving the wait
    # for the weighted values up, before the weights.
    after = count + 2
    mbarrier.wait(k_full.index(after % STAGES), after // STAGES & 1, pred=more)
    acc = warpgroup_mma_wait(0, [acc])
    mbarrier.arrive(v_empty.index(before))
    w = gl.convert_layout(p.to(values.dtype), w.type.layout)
    acc = acc * gl.convert_layout(fade, gl.SliceLayout(1, acc.type.layout))[:, None]
    return m, total, acc, w


@gluon.jit
def _consume(  # size: one algorithm
    out_tiles, out_ptr, lse_ptr, queries, keys, values, barriers, batch, num_items, lse_stride,
    scale, PART: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
    O_TOKEN: gl.constexpr, O_HEAD: gl.constexpr,
):  # fmt: skip
    """Attend for the rows of one group, for one item after another."""
    DV: gl.constexpr = values.shape[2]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    S_ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    O_ROW: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    V_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DV, DV // 8], [4, 1], [1, 0])
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    dtype: gl.constexpr = values.dtype
    q = queries[0].index(PART)
    q_rope = queries[1].index(PART)
    none = gl.zeros([_ROWS, BN], gl.float32, S_LAYOUT)
    count = 0
    for trip in range(_trips(num_items)):
        head, query, rows, _, num_keys, past, tiles = _item(trip, batch, BN, CAUSAL)
        row = PART * _ROWS + gl.arange(0, _ROWS, S_ROW)
        last = row * 0 + num_keys
        whole = num_keys // BN
        if CAUSAL:
            last = gl.minimum(past + row + 1, num_keys)
            whole = gl.minimum(gl.maximum(past + 1, 0) // BN, whole)
        masked = gl.maximum(tiles - whole, 1)
        start = (tiles - 1) * BN

        mbarrier.wait(q_full, trip & 1)
        stage = count % STAGES
        mbarrier.wait(k_full.index(stage), count // STAGES & 1)
        s = _logits(q, q_rope, keys, stage, none)
        s = warpgroup_mma_wait(0, [s])
        mbarrier.arrive(k_empty.index(stage))
        m = gl.full([_ROWS], _NOTHING, gl.float32, S_ROW)
        total = gl.zeros([_ROWS], gl.float32, S_ROW)
        p, _, m, total = soften(_hide(s, start, last), m, total, scale)
        w = gl.convert_layout(p.to(dtype), WEIGHTS)
        acc = gl.zeros([_ROWS, DV], gl.float32, O_LAYOUT)
        if start + BN > num_keys:
            # Rows behind a request are another's: weights there are 0, and values may be NaN. Both
            # groups clear them, and write the same.
            mbarrier.wait(v_full.index(stage), count // STAGES & 1)
            there = values.index(stage).load(V_LAYOUT)
            at = start + gl.arange(0, BN, gl.SliceLayout(1, V_LAYOUT))
            values.index(stage).store(gl.where((at < num_keys)[:, None], there, 0.0))
            fence_async_shared()
            _barrier()
        after = count + 1
        mbarrier.wait(k_full.index(after % STAGES), after // STAGES & 1, pred=tiles > 1)
        for i in range(1, masked):
            start -= BN
            m, total, acc, w = _step(
                q, q_rope, keys, values, barriers, count, i + 1 < tiles, m, total, acc, w, none,
                scale, start, last, STAGES, True,
            )  # fmt: skip
            count += 1
        for i in range(masked, tiles):
            m, total, acc, w = _step(
                q, q_rope, keys, values, barriers, count, i + 1 < tiles, m, total, acc, w, none,
                scale, start, last, STAGES, False,
            )  # fmt: skip
            count += 1
        if out_tiles is None:
            mbarrier.arrive(q_empty)
        stage = count % STAGES
        mbarrier.wait(v_full.index(stage), count // STAGES & 1)
        acc = warpgroup_mma(w, values.index(stage), acc, is_async=True)
        acc = warpgroup_mma_wait(0, [acc])
        mbarrier.arrive(v_empty.index(stage))
        count += 1

        is_empty = total == 0
        divisor = gl.where(is_empty, 1.0, total)
        if lse_ptr is not None:
            lse = gl.where(is_empty, -float("inf"), (m + gl.log2(divisor)) * _LN2)
            gl.store(lse_ptr + head.to(gl.int64) * lse_stride + query + row, lse, mask=row < rows)
        out = (acc * gl.convert_layout(1.0 / divisor, O_ROW)[:, None]).to(dtype)
        is_whole = False
        if out_tiles is not None:  # by way of the queries' buffer, which is free
            is_whole = rows >= PART * _ROWS + _ROWS
            if is_whole:
                q.store(out)
                fence_async_shared()
                _barrier()
                place = [query + PART * _ROWS, head * O_HEAD]
                tma.async_copy_shared_to_global(out_tiles, place, q)
                tma.store_wait(0)
        if not is_whole:
            r = PART * _ROWS + gl.arange(0, _ROWS, O_ROW)
            d = gl.arange(0, DV, gl.SliceLayout(0, O_LAYOUT))
            to = out_ptr + head * O_HEAD + (query + r).to(gl.int64)[:, None] * O_TOKEN + d[None, :]
            gl.store(to, out, mask=(r < rows)[:, None])
        if out_tiles is not None:
            mbarrier.arrive(q_empty)


@gluon.jit(do_not_specialize=["num_reqs", "section_heads", "lse_stride"])
def mla_prompt_hopper(  # size: one algorithm
    q_tiles,
    q_rope_tiles,
    k_tiles,
    rope_tiles,
    v_tiles,
    out_tiles,
    out_ptr,
    lse_ptr,
    blocks_ptr,
    query_starts,
    key_starts,
    num_reqs,
    section_heads,
    lse_stride,
    scale,
    HQ: gl.constexpr,
    BN: gl.constexpr,
    STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
    Q_HEAD: gl.constexpr,
    K_HEAD: gl.constexpr,
    R_HEAD: gl.constexpr,
    V_HEAD: gl.constexpr,
    O_TOKEN: gl.constexpr,
    O_HEAD: gl.constexpr,
):
    """Attend for blocks of query tokens to keys that come with the call.

    Launched with 4 warps, of which there are 12 then, and with as many programs as there are items,
    a block of 2 x 64 query tokens of one head each; fewer programs take one after another.

    What the parameters are:

        q_tiles: queries (T, heads x (nope + rope)), tiles of (64, nope).
        q_rope_tiles: the same, tiles of (64, rope).
        k_tiles: keys without the rope part (Tk, columns), tiles of (BN, nope).
        rope_tiles: rope parts of keys, tiles of (BN, rope).
        v_tiles: values (Tk, columns), tiles of (BN, DV).
        out_tiles: the output, tiles of (64, DV), for blocks that are whole; or None.
        out_ptr: (T, heads, DV).
        lse_ptr: (heads, T) float32, natural logarithms, or None.
        blocks_ptr: of `plan_blocks`, for blocks of 2 x 64 rows.
        query_starts: (B + 1,) int32.
        key_starts: (B + 1,) int32.
        num_reqs: B.
        section_heads: heads whose keys the L2 holds at once; they divide HQ.
        lse_stride: of a head's LSEs.
        scale: factor on q.k, above 0, times log2(e).
        Q_HEAD: columns from one head's queries to the next's, as K_HEAD, R_HEAD and V_HEAD of keys,
            rope parts (0: shared by all heads) and values.
        O_TOKEN: elements from one token of the output to the next, as O_HEAD of heads.
    """
    dtype: gl.constexpr = v_tiles.dtype
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    NOPE: gl.constexpr = q_tiles.block_shape[1]
    ROPE: gl.constexpr = q_rope_tiles.block_shape[1]
    DV: gl.constexpr = v_tiles.block_shape[1]
    q = gl.allocate_shared_memory(dtype, [2, _ROWS, NOPE], q_tiles.layout)
    q_rope = gl.allocate_shared_memory(dtype, [2, _ROWS, ROPE], q_rope_tiles.layout)
    k = gl.allocate_shared_memory(dtype, [STAGES, BN, NOPE], k_tiles.layout)
    rope = gl.allocate_shared_memory(dtype, [STAGES, BN, ROPE], rope_tiles.layout)
    values = gl.allocate_shared_memory(dtype, [STAGES, BN, DV], v_tiles.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=2)
    fence_async_shared()
    num_blocks = gl.load(blocks_ptr)
    num_items = num_blocks * HQ
    batch = (blocks_ptr, query_starts, key_starts, num_blocks, num_reqs, section_heads)
    queries = (q, q_rope)
    keys = (k, rope)
    barriers = (q_full, q_empty, k_full, k_empty, v_full, v_empty)
    descriptors = (q_tiles, q_rope_tiles, k_tiles, rope_tiles, v_tiles)
    gl.warp_specialize(
        [
            (_consume, (
                out_tiles, out_ptr, lse_ptr, queries, keys, values, barriers, batch, num_items,
                lse_stride, scale, 0, BN, STAGES, CAUSAL, O_TOKEN, O_HEAD,
            )),
            (_consume, (
                out_tiles, out_ptr, lse_ptr, queries, keys, values, barriers, batch, num_items,
                lse_stride, scale, 1, BN, STAGES, CAUSAL, O_TOKEN, O_HEAD,
            )),
            (_produce, (
                descriptors, queries, keys, values, barriers, batch, num_items,
                BN, STAGES, CAUSAL, Q_HEAD, K_HEAD, R_HEAD, V_HEAD,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def variants(arch: str) -> Iterator[KernelVariant]:
    """Yield how the kernel is launched on an architecture."""
    yield from mla_prompt_variants(mla_prompt_hopper, arch)
