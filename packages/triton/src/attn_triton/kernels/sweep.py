"""What decode and prefill share: bounds of rows, one pass over keys, the end of a softmax.

A tile has rows of one kv head: row i of a request is query token i // G of query head i % G among
the G that share the kv head, so that any G fits any tile and K and V are read once for all of them.
Logits are in units of log2, so that exponentials are exp2. The running maximum starts at a finite
number and hidden logits are -inf: a row that has seen no key has weight 0 and no NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["LOG2E", "bounds_of", "finish", "in_half", "row_start", "sweep", "tanh"]

LOG2E = 1.4426950408889634
_LOG2E = tl.constexpr(LOG2E)
_LN2 = tl.constexpr(0.6931471805599453)
_LOWEST = tl.constexpr(-1e30)
_SMALL = tl.constexpr(0.55)


@triton.jit
def row_start(ROWS: tl.constexpr):
    """Return the maxima of rows that have seen no key."""
    return tl.full([ROWS], _LOWEST, tl.float32)


@triton.jit
def in_half(q, scale):
    """Return bfloat16 query rows in float16, and the logits' factor of each, for an fp8 cache.

    Fp8 turns into float16 by one instruction for two numbers, into bfloat16 by several for one.
    float16 lacks bfloat16's range, so that each row is divided by a power of two first.
    """
    size = tl.max(tl.abs(q.to(tl.float32)), 1)
    power = tl.math.exp2(tl.math.ceil(tl.math.log2(tl.where(size > 0, size, 1.0))))
    return (q.to(tl.float32) / power[:, None]).to(tl.float16), (power * scale)[:, None]


@triton.jit
def bounds_of(
    position,
    num_keys,
    is_causal,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    CHUNK: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """Return the first key that queries at `position` see, and one past the last.

    Both never fall as the position rises. LEFT and RIGHT are -1 and CHUNK 0 where there is none;
    CAUSAL is 0, 1, or 2 for `is_causal` to say.
    """
    first = position * 0
    if LEFT >= 0:
        first = tl.maximum(position - LEFT, 0)
    if CHUNK > 0:
        first = tl.maximum(first, tl.maximum(position, 0) // CHUNK * CHUNK)
    last = position * 0 + num_keys
    if RIGHT >= 0:
        last = tl.minimum(last, position + RIGHT + 1)
    if CAUSAL == 1:
        last = tl.minimum(position + 1, num_keys)
    if CAUSAL == 2:
        last = tl.where(is_causal, tl.minimum(position + 1, num_keys), last)
    return first, last


@triton.jit
def tanh(x):
    """Return tanh of finite x, good to 6e-7 of its size: a cap far above logits scales errors up.

    Near 0, where 1 - exp(-2 |x|) cancels, it is x + x^3 p(x^2), p fitted to (tanh(x) / x - 1) / x^2
    over |x| <= 0.55 for the least relative error, 3.7e-8.
    """
    size = tl.abs(x)
    e = tl.math.exp2(size * (-2.0 * _LOG2E))
    far = (1.0 - e) / (1.0 + e)
    y = x * x
    p = -0.33332947 + y * (0.13320725 + y * (-0.05267181 + y * 0.016437577))
    return tl.where(size < _SMALL, x + x * y * p, tl.where(x < 0, -far, far))


@triton.jit
def _in_ranges(seen, position, n, ranges, num_ranges):
    """Widen a mask by the ranges whose positions see each other."""
    for r in range(num_ranges):
        start = tl.load(ranges + 2 * r)
        stop = tl.load(ranges + 2 * r + 1)
        rows = (position >= start) & (position <= stop)
        keys = (n >= start) & (n <= stop)
        seen = seen | (rows[:, None] & keys[None, :])
    return seen


@triton.jit
def _load(pointers, column, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    if WIDTH == PADDED:
        return tl.load(pointers)
    return tl.load(pointers, mask=(column < WIDTH)[None, :], other=0.0)


@triton.jit
def _widen(tile, like, INT8: tl.constexpr):
    """Return a tile of the cache in the queries' dtype, which holds each of its numbers."""
    if INT8:
        return tile.to(tl.float32).to(like.dtype)
    return tile.to(like.dtype)


@triton.jit
def sweep(  # size: one algorithm
    q,
    m,
    total,
    acc,
    k_ptr,
    v_ptr,
    k_scales,
    v_scales,
    table,
    start,
    end,
    num_keys,
    position,
    first,
    last,
    slope,
    scale,
    cap,
    ranges,
    num_ranges,
    D: tl.constexpr,
    DV: tl.constexpr,
    DP: tl.constexpr,
    DVP: tl.constexpr,
    BN: tl.constexpr,
    PAGE: tl.constexpr,
    K_BLOCK: tl.constexpr,
    K_TOKEN: tl.constexpr,
    V_BLOCK: tl.constexpr,
    V_TOKEN: tl.constexpr,
    MASK: tl.constexpr,
    HAS_FIRST: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    INT8: tl.constexpr,
    RANGES: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Run an online softmax over keys [start, end), and return maximum, sum and weighted values.

    Keys past the last are read as the last one, so that no slot beyond a sequence is ever read.
    The page numbers of a tile are loaded an iteration ahead: a load that waits for another would
    halve the depth to which the compiler prefetches.
    """
    i = tl.arange(0, BN)
    d = tl.arange(0, DP)
    dv = tl.arange(0, DVP)
    page = i
    if PAGE > 0:
        live = (i >= 0) & (end > start)
        page = tl.load(table + tl.minimum(start + i, num_keys - 1) // PAGE, mask=live, other=0)
    for j in tl.range(start, end, BN, num_stages=STAGES):
        n = j + i
        at = n
        if MASK:
            at = tl.minimum(n, num_keys - 1)
        if PAGE > 0:
            within = at % PAGE
            k_at = page.to(tl.int64) * K_BLOCK + within * K_TOKEN
            v_at = page.to(tl.int64) * V_BLOCK + within * V_TOKEN
        else:
            k_at = at.to(tl.int64) * K_TOKEN
            v_at = at.to(tl.int64) * V_TOKEN
        k = _widen(_load(k_ptr + (k_at[:, None] + d[None, :]), d, D, DP), q, INT8)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        if INT8:
            s = s * tl.load(k_scales + k_at // 4)[None, :]
        s = s * scale
        if SOFTCAP:
            s = tanh(s) * cap
        if ALIBI:
            s = s - slope[:, None] * tl.abs(position[:, None] - n[None, :]).to(tl.float32)
        if MASK:
            seen = n[None, :] < last[:, None]
            if HAS_FIRST:
                seen = seen & (n[None, :] >= first[:, None])
            if RANGES:
                seen = _in_ranges(seen, position, n, ranges, num_ranges)
                seen = seen & (n < num_keys)[None, :]
            s = tl.where(seen, s, -float("inf"))
        top = tl.maximum(m, tl.max(s, 1))
        p = tl.math.exp2(s - top[:, None])
        fade = tl.math.exp2(m - top)
        total = total * fade + tl.sum(p, 1)
        acc = acc * fade[:, None]
        v = _load(v_ptr + (v_at[:, None] + dv[None, :]), dv, DV, DVP)
        if INT8:
            v = v.to(tl.float32) * tl.load(v_scales + v_at // 4)[:, None]
        v = v.to(q.dtype)
        if PAGE > 0:
            page = tl.load(table + tl.minimum(n + BN, num_keys - 1) // PAGE)
        acc = tl.dot(p.to(q.dtype), v, acc, input_precision="ieee")
        m = top
    return m, total, acc


@triton.jit
def finish(m, total, acc, sink, SINKS: tl.constexpr):
    """Return outputs and natural-log LSEs of rows; one without a key has 0 and -inf, or its sink.

    Args:
        m: (rows,) maxima, in units of log2.
        total: (rows,) sums of weights under them.
        acc: (rows, Dv) weighted values.
        sink: (rows,) natural logits of value zero, with SINKS.
        SINKS: whether there are any.
    """
    if SINKS:
        extra = sink * _LOG2E
        top = tl.maximum(m, extra)
        fade = tl.math.exp2(m - top)
        total = total * fade + tl.math.exp2(extra - top)
        acc = acc * fade[:, None]
        m = top
    is_empty = total == 0
    whole = tl.where(is_empty, 1.0, total)
    lse = tl.where(is_empty, -float("inf"), (m + tl.math.log2(whole)) * _LN2)
    return acc / whole[:, None], lse
