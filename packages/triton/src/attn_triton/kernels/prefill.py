"""Attention of many query tokens per request, over a paged cache or over keys of the call."""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl

from attn_triton.attention_variants import prefill_variants
from attn_triton.kernels.plan import HEADER, RECORD
from attn_triton.kernels.sweep import bounds_of, finish, in_half, row_start, sweep
from attn_triton.variants import KernelVariant

__all__ = ["prefill", "variants"]

_HEADER = tl.constexpr(HEADER)
_RECORD = tl.constexpr(RECORD)
_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _request_of(block, starts, num_reqs):
    """Return the request that a block of query rows belongs to: the last that starts at or before.

    Args:
        block: below starts[num_reqs].
        starts: (num_reqs + 1,) first block of each request.
        num_reqs: requests.
    """
    low = 0
    high = num_reqs
    while high - low > 1:
        middle = (low + high) // 2
        is_right = tl.load(starts + middle) <= block
        low = tl.where(is_right, middle, low)
        high = tl.where(is_right, high, middle)
    return low


@triton.jit(do_not_specialize=["num_reqs", "max_items", "table_stride", "lse_stride", "num_ranges"])
def prefill(  # size: one algorithm
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    plan_ptr,
    table_ptr,
    lens_ptr,
    query_starts,
    causal_ptr,
    ranges_ptr,
    sinks_ptr,
    slopes_ptr,
    k_scale_ptr,
    v_scale_ptr,
    num_reqs,
    max_items,
    table_stride,
    num_ranges,
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
):
    """Attend for a block of ROWS query rows of one kv head over all keys that they see.

    Programs: (blocks of the plan, kv heads), the last fastest, blocks with most keys first; those
    past the plan's blocks do nothing. Tiles that every row sees whole run without a mask, tiles
    that no row sees are left out. The arguments are those of `decode`, and:

    What the parameters are:

        lens_ptr: with PAGE=0, (B + 1,) int32 prefix sums of keys; then K and V are (keys, HK, D).
        ranges_ptr: (B, num_ranges, 2) int32: positions that see each other, both ends included; a
            start past its end is no range. With it every tile is masked.
        num_ranges: ranges per request.
    """
    num_blocks = tl.load(plan_ptr + 1)
    kv_head = tl.program_id(0) % HK
    if tl.program_id(0) // HK >= num_blocks:
        return
    block = num_blocks - 1 - tl.program_id(0) // HK
    starts = plan_ptr + _HEADER + _RECORD * max_items + num_reqs + 1
    b = _request_of(block, starts, num_reqs)
    q0 = tl.load(query_starts + b)
    num_rows = (tl.load(query_starts + b + 1) - q0) * (HQ // HK)
    table = table_ptr
    if PAGE > 0:
        num_keys = tl.load(lens_ptr + b)
        table = table_ptr + tl.cast(b, tl.int64) * table_stride
        k_at = 0
        v_at = 0
    else:
        key0 = tl.load(lens_ptr + b)
        num_keys = tl.load(lens_ptr + b + 1) - key0
        k_at = key0.to(tl.int64) * K_TOKEN
        v_at = key0.to(tl.int64) * V_TOKEN
    is_causal = False
    if CAUSAL == 2:
        is_causal = tl.load(causal_ptr + b) != 0

    row0 = (block - tl.load(starts + b)) * ROWS
    row = row0 + tl.arange(0, ROWS)
    live = row < num_rows
    token = tl.minimum(row, num_rows - 1) // (HQ // HK)
    head = kv_head * (HQ // HK) + row % (HQ // HK)
    past = num_keys - num_rows // (HQ // HK)
    first, last = bounds_of(past + token, num_keys, is_causal, LEFT, RIGHT, CHUNK, CAUSAL)
    top = past + row0 // (HQ // HK)
    bottom = past + tl.minimum(row0 + ROWS - 1, num_rows - 1) // (HQ // HK)
    begin, whole_end = bounds_of(top, num_keys, is_causal, LEFT, RIGHT, CHUNK, CAUSAL)
    whole_begin, end = bounds_of(bottom, num_keys, is_causal, LEFT, RIGHT, CHUNK, CAUSAL)
    begin = begin // BN * BN
    whole_begin = (whole_begin + BN - 1) // BN * BN
    whole_end = tl.maximum(whole_end // BN * BN, whole_begin)
    if ranges_ptr is not None:
        begin = 0
        whole_end = 0
        end = num_keys

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
    ranges = plan_ptr
    if ranges_ptr is not None:
        ranges = ranges_ptr + b * num_ranges * 2
    keys = k_ptr + (k_at + kv_head * K_HEAD)
    values = v_ptr + (v_at + kv_head * V_HEAD)
    m = row_start(ROWS)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DVP], tl.float32)
    HAS_FIRST: tl.constexpr = LEFT >= 0 or CHUNK > 0
    RANGES: tl.constexpr = ranges_ptr is not None
    if HAS_FIRST and not RANGES:
        m, total, acc = sweep(
            q, m, total, acc, keys, values, k_scales, v_scales, table,
            begin, tl.minimum(whole_begin, end), num_keys,
            past + token, first, last, slope, scale, cap, ranges, num_ranges,
            D, DV, DP, DVP, BN, PAGE, K_BLOCK, K_TOKEN, V_BLOCK, V_TOKEN,
            True, True, SOFTCAP, slopes_ptr is not None, INT8, False, STAGES,
        )  # fmt: skip
        begin = whole_begin
    if not RANGES:
        m, total, acc = sweep(
            q, m, total, acc, keys, values, k_scales, v_scales, table,
            begin, whole_end, num_keys,
            past + token, first, last, slope, scale, cap, ranges, num_ranges,
            D, DV, DP, DVP, BN, PAGE, K_BLOCK, K_TOKEN, V_BLOCK, V_TOKEN,
            False, False, SOFTCAP, slopes_ptr is not None, INT8, False, STAGES,
        )  # fmt: skip
    m, total, acc = sweep(
        q, m, total, acc, keys, values, k_scales, v_scales, table,
        whole_end, end, num_keys,
        past + token, first, last, slope, scale, cap, ranges, num_ranges,
        D, DV, DP, DVP, BN, PAGE, K_BLOCK, K_TOKEN, V_BLOCK, V_TOKEN,
        True, HAS_FIRST, SOFTCAP, slopes_ptr is not None, INT8, RANGES, STAGES,
    )  # fmt: skip

    sink = 0.0
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head, mask=live, other=0.0)
    out, lse = finish(m, total, acc * v_scale, sink, sinks_ptr is not None)
    dv = tl.arange(0, DVP)
    to = (q0 + token).to(tl.int64) * O_TOKEN + head * O_HEAD
    inside = live[:, None] & (dv < DV)[None, :]
    tl.store(out_ptr + (to[:, None] + dv[None, :]), out.to(out_ptr.dtype.element_ty), mask=inside)
    if lse_ptr is not None and lse_stride >= 0:
        tl.store(lse_ptr + head.to(tl.int64) * lse_stride + q0 + token, lse, mask=live)


def variants(arch: str) -> Iterator[KernelVariant]:
    """Yield how the kernel is launched on an architecture."""
    yield from prefill_variants(prefill, arch)
