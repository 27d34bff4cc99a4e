"""Attention of few query tokens per request over a paged cache, the keys cut into parts."""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl

from attn_triton.attention_variants import decode_variants
from attn_triton.kernels.dependent import release_next, wait_for_earlier
from attn_triton.kernels.plan import HEADER, RECORD
from attn_triton.kernels.sweep import bounds_of, finish, in_half, row_start, sweep
from attn_triton.variants import KernelVariant

__all__ = ["decode", "variants"]

_HEADER = tl.constexpr(HEADER)
_RECORD = tl.constexpr(RECORD)
_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["num_reqs", "max_items", "max_rows", "table_stride", "lse_stride"])
def decode(  # size: one algorithm
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    part_ptr,
    stat_ptr,
    plan_ptr,
    table_ptr,
    causal_ptr,
    sinks_ptr,
    slopes_ptr,
    k_scale_ptr,
    v_scale_ptr,
    num_reqs,
    max_items,
    max_rows,
    table_stride,
    lse_stride,
    scale,
    v_scale,
    cap,
    HQ: tl.constexpr,
    HK: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    DP: tl.constexpr,
    DVP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BN: tl.constexpr,
    STAGES: tl.constexpr,
    PAGE: tl.constexpr,
    Q_TOKEN: tl.constexpr,
    Q_HEAD: tl.constexpr,
    O_TOKEN: tl.constexpr,
    O_HEAD: tl.constexpr,
    K_BLOCK: tl.constexpr,
    K_TOKEN: tl.constexpr,
    K_HEAD: tl.constexpr,
    V_BLOCK: tl.constexpr,
    V_TOKEN: tl.constexpr,
    V_HEAD: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    CHUNK: tl.constexpr,
    CAUSAL: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SCALES: tl.constexpr,
    INT8: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attend to one part of a request's keys for up to ROWS query rows of one kv head.

    Programs: (items of the plan, kv heads, BLOCKS), the last fastest; those past the plan's items
    do nothing. A request of one part is written as it is, the parts of others go to the combine
    kernel. Absent pointers are None; without a place for parts no request has more than one.

    What the parameters are:

        q_ptr: (T, HQ, D).
        k_ptr: (blocks, PAGE, HK, D) by strides; fp8 or int8 too.
        v_ptr: (blocks, PAGE, HK, DV).
        out_ptr: (T, HQ, DV).
        lse_ptr: (HQ, T) float32, natural logarithms.
        part_ptr: (items, HK, max_rows, DV) float32: weighted values of parts.
        stat_ptr: (items, HK, max_rows, 2) float32: their maxima and sums.
        plan_ptr: of `plan_step`.
        table_ptr: (B, M) int32 block ids.
        causal_ptr: (B,) bytes, with CAUSAL=2.
        sinks_ptr: (HQ,) float32.
        slopes_ptr: (HQ,) float32.
        k_scale_ptr: float32, (1,) or (HK,) by SCALES; with INT8 one per entry, by the strides of K.
        v_scale_ptr: the same of values.
        num_reqs: B.
        max_items: of the plan.
        max_rows: query rows of one kv head that a request has at most.
        table_stride: of the block table.
        lse_stride: of a head's LSEs; below 0 none are wanted.
        scale: factor on q.k, times log2(e); with SOFTCAP divided by the cap instead.
        v_scale: factor on the output.
        cap: with SOFTCAP the cap times log2(e).
        SCALES: 0 none, 1 per tensor, 2 per kv head.
        PDL: launched as in `dependent`.
    """
    part_of = tl.program_id(0) // (HK * BLOCKS)
    wait_for_earlier(PDL)
    release_next(PDL)
    kv_head = tl.program_id(0) // BLOCKS % HK
    # All at once: a record past the last is within the plan, and what it holds is not looked at.
    record = plan_ptr + _HEADER + _RECORD * part_of
    num_items = tl.load(plan_ptr)
    b = tl.load(record)
    start = tl.load(record + 1)
    end = tl.load(record + 2)
    parts = tl.load(record + 3)
    num_keys = tl.load(record + 4)
    q0 = tl.load(record + 5)
    num_rows = tl.load(record + 6) * (HQ // HK)
    if part_of >= num_items:
        return

    row = tl.program_id(0) % BLOCKS * ROWS + tl.arange(0, ROWS)
    live = row < num_rows
    token = tl.minimum(row, num_rows - 1) // (HQ // HK)
    head = kv_head * (HQ // HK) + row % (HQ // HK)
    position = num_keys - num_rows // (HQ // HK) + token
    is_causal = False
    if CAUSAL == 2:
        is_causal = tl.load(causal_ptr + b) != 0
    first, last = bounds_of(position, num_keys, is_causal, LEFT, RIGHT, CHUNK, CAUSAL)
    last = tl.minimum(last, end)

    d = tl.arange(0, DP)
    at = (q0 + token).to(tl.int64) * Q_TOKEN + head * Q_HEAD
    q = tl.load(
        q_ptr + (at[:, None] + d[None, :]), mask=live[:, None] & (d < D)[None, :], other=0.0
    )
    slope = 0.0
    if slopes_ptr is not None:
        slope = tl.load(slopes_ptr + head, mask=live, other=0.0) * _LOG2E
    if SCALES == 1:
        scale = scale * tl.load(k_scale_ptr)
        v_scale = v_scale * tl.load(v_scale_ptr)
    if SCALES == 2:
        scale = scale * tl.load(k_scale_ptr + kv_head)
        v_scale = v_scale * tl.load(v_scale_ptr + kv_head)
    if k_ptr.dtype.element_ty.is_fp8() and q.dtype == tl.bfloat16:
        q, scale = in_half(q, scale)
    k_scales = k_scale_ptr
    v_scales = v_scale_ptr
    if INT8:
        k_scales = k_scale_ptr + kv_head * (K_HEAD // 4)
        v_scales = v_scale_ptr + kv_head * (V_HEAD // 4)
    m, total, acc = sweep(
        q,
        row_start(ROWS),
        tl.zeros([ROWS], tl.float32),
        tl.zeros([ROWS, DVP], tl.float32),
        k_ptr + kv_head * K_HEAD,
        v_ptr + kv_head * V_HEAD,
        k_scales,
        v_scales,
        table_ptr + b.to(tl.int64) * table_stride,
        start,
        end,
        num_keys,
        position,
        first,
        last,
        slope,
        scale,
        cap,
        plan_ptr,
        0,
        D=D,
        DV=DV,
        DP=DP,
        DVP=DVP,
        BN=BN,
        PAGE=PAGE,
        K_BLOCK=K_BLOCK,
        K_TOKEN=K_TOKEN,
        V_BLOCK=V_BLOCK,
        V_TOKEN=V_TOKEN,
        MASK=True,
        HAS_FIRST=LEFT >= 0 or CHUNK > 0,
        SOFTCAP=SOFTCAP,
        ALIBI=slopes_ptr is not None,
        INT8=INT8,
        RANGES=False,
        STAGES=STAGES,
    )
    acc = acc * v_scale

    dv = tl.arange(0, DVP)
    inside = live[:, None] & (dv < DV)[None, :]
    if part_ptr is not None and parts > 1:
        slot = (part_of * HK + kv_head).to(tl.int64) * max_rows + row
        tl.store(part_ptr + (slot[:, None] * DV + dv[None, :]), acc, mask=inside)
        tl.store(stat_ptr + slot * 2, m, mask=live)
        tl.store(stat_ptr + slot * 2 + 1, total, mask=live)
    else:
        sink = 0.0
        if sinks_ptr is not None:
            sink = tl.load(sinks_ptr + head, mask=live, other=0.0)
        out, lse = finish(m, total, acc, sink, sinks_ptr is not None)
        to = (q0 + token).to(tl.int64) * O_TOKEN + head * O_HEAD
        out = out.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + (to[:, None] + dv[None, :]), out, mask=inside)
        if lse_ptr is not None and lse_stride >= 0:
            tl.store(lse_ptr + head.to(tl.int64) * lse_stride + q0 + token, lse, mask=live)


def variants(arch: str) -> Iterator[KernelVariant]:
    """Yield how the kernel is launched on an architecture."""
    yield from decode_variants(decode, arch)
