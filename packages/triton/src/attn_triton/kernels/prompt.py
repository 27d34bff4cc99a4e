"""Attention of long prompts: tiles by tensor descriptors, whole ones apart from those with a mask.

A program has 2 x BLOCK rows of one query head, as two blocks: the weighted values of the first are
summed while the second's weights are computed. Two programs share a multiprocessor, and one's
products run under the other's exponentials; the compiler waits for each product of queries and
keys, so that one larger program would not do that for itself.

Keys come in two stretches: those of earlier steps from pages (CONTEXT=1) or from dense rows that
were copied out of pages (CONTEXT=2), those of this step from the tensors of the call (FRESH).
"""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl

from attn_triton.kernels.blocks import HEADER
from attn_triton.kernels.sweep import LOG2E, bounds_of, finish, row_start, tanh
from attn_triton.prompt_variants import prompt_variants
from attn_triton.variants import KernelVariant

__all__ = ["prompt", "variants"]

_HEADER = tl.constexpr(HEADER)
_LOG2E = tl.constexpr(LOG2E)


@triton.jit
def _logits(
    q, k, first, last, n, steep,
    MASK: tl.constexpr, HAS_FIRST: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Return q.k, hidden keys at -inf; with SOFTCAP=1 the (tanh(x) - 1) / 2 of it, with 2 tanh(x).

    The first is -1 / (1 + exp(2 x)), good to 2e-7 of 1: enough for weights in half precision, but
    times twice a cap of 30 an LSE is 1e-5 off. A reciprocal takes several instructions, that of a
    square root one. `steep` makes x, with SOFTCAP=1 2 x in units of log2.
    """
    s = tl.dot(q, k.T)
    if SOFTCAP == 1:
        root = tl.math.rsqrt(1.0 + tl.math.exp2(s * steep))
        s = root * -root
    if SOFTCAP == 2:
        s = tanh(s * steep)
    if MASK:
        seen = n[None, :] < last[:, None]
        if HAS_FIRST:
            seen = seen & (n[None, :] >= first[:, None])
        s = tl.where(seen, s, -float("inf"))
    return s


@triton.jit
def _add(s, v, m, total, acc, scale):
    """Add a tile to running maxima, sums and weighted values; `scale`, above 0, comes into exp2."""
    top = tl.maximum(m, tl.max(s, 1) * scale)
    p = tl.math.exp2(s * scale - top[:, None])
    fade = tl.math.exp2(m - top)
    acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None])
    return top, total * fade + tl.sum(p, 1), acc


@triton.jit
def _pass(  # size: one loop
    q1,
    q2,
    m1,
    total1,
    acc1,
    m2,
    total2,
    acc2,
    k_desc,
    v_desc,
    table,
    k_row,
    v_row,
    k_col,
    v_col,
    start,
    end,
    stop,
    top,
    num_keys,
    is_causal,
    scale,
    cap,
    BLOCK: tl.constexpr,
    BN: tl.constexpr,
    TWO: tl.constexpr,
    PAGE: tl.constexpr,
    K_ROWS: tl.constexpr,
    V_ROWS: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    CHUNK: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASK: tl.constexpr,
    TAIL: tl.constexpr,
    SOFTCAP: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Run the online softmax of both blocks over keys [start, end).

    Without PAGE a key's row is its position and `k_row`; with it a tile lies in one page, whose
    number is loaded an iteration ahead: a load that waits for another would halve the depth to
    which the compiler prefetches. TAIL says that the tile may reach past `stop`, where the memory
    may hold anything.
    """
    # Without the comparison with a first key, heads of 64 get 227 registers instead of 160, and a
    # multiprocessor two programs instead of three: 346 TFLOP/s at 1x4096 instead of 429.
    HAS_FIRST: tl.constexpr = LEFT >= 0 or CHUNK > 0 or q1.shape[1] <= 64
    i = tl.arange(0, BN)
    first1, last1, first2, last2 = 0, 0, 0, 0
    if MASK:  # made here, and not held in registers while whole tiles run
        row = top + tl.arange(0, BLOCK)
        first1, last1 = bounds_of(row, num_keys, is_causal, LEFT, RIGHT, CHUNK, CAUSAL)
        last1 = tl.minimum(last1, stop)
        if TWO:
            row += BLOCK
            first2, last2 = bounds_of(row, num_keys, is_causal, LEFT, RIGHT, CHUNK, CAUSAL)
            last2 = tl.minimum(last2, stop)
    factor = scale
    steep = 1.0
    if SOFTCAP == 1:  # cap * tanh(x) is cap + 2 cap * (what `_logits` returns)
        steep = scale * (2.0 * _LOG2E)
        factor = 2.0 * cap
    if SOFTCAP == 2:
        steep = scale
        factor = cap
    page = 0
    if PAGE > 0:
        page = tl.load(table + start // PAGE, mask=start < end, other=0)
    for j in tl.range(start, end, BN, num_stages=STAGES):
        n = j + i
        if PAGE > 0:
            k = k_desc.load([page * K_ROWS + k_row + j % PAGE, k_col])
            v = v_desc.load([page * V_ROWS + v_row + j % PAGE, v_col])
            page = tl.load(table + tl.minimum(j + BN, stop - 1) // PAGE)
        else:
            k = k_desc.load([k_row + j, k_col])
            v = v_desc.load([v_row + j, v_col])
        if TAIL:
            v = tl.where((n < stop)[:, None], v, 0.0)
        s1 = _logits(q1, k, first1, last1, n, steep, MASK, HAS_FIRST, SOFTCAP)
        if TWO:
            s2 = _logits(q2, k, first2, last2, n, steep, MASK, HAS_FIRST, SOFTCAP)
        m1, total1, acc1 = _add(s1, v, m1, total1, acc1, factor)
        if TWO:
            m2, total2, acc2 = _add(s2, v, m2, total2, acc2, factor)
    return m1, total1, acc1, m2, total2, acc2


@triton.jit
def _edges(  # size: two calls of one function
    q,
    m,
    total,
    acc,
    k_desc,
    v_desc,
    table,
    k_row,
    v_row,
    k_col,
    v_col,
    start,
    tail,
    end,
    stop,
    top,
    num_keys,
    is_causal,
    scale,
    cap,
    BLOCK: tl.constexpr,
    BN: tl.constexpr,
    PAGE: tl.constexpr,
    K_ROWS: tl.constexpr,
    V_ROWS: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    CHUNK: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_LAST: tl.constexpr,
    SOFTCAP: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Run the tiles behind the whole ones for one block: each has fewer of them than both."""
    first = tl.maximum(start, tail)
    if HAS_LAST:
        m, total, acc, _, _, _ = _pass(
            q, 0.0, m, total, acc, 0.0, 0.0, 0.0, k_desc, v_desc, table,
            k_row, v_row, k_col, v_col, start, tl.minimum(tail, end), stop,
            top, num_keys, is_causal, scale, cap,
            BLOCK, BN, False, PAGE, K_ROWS, V_ROWS, LEFT, RIGHT, CHUNK, CAUSAL,
            True, False, SOFTCAP, STAGES,
        )  # fmt: skip
    m, total, acc, _, _, _ = _pass(
        q, 0.0, m, total, acc, 0.0, 0.0, 0.0, k_desc, v_desc, table,
        k_row, v_row, k_col, v_col, first, end, stop,
        top, num_keys, is_causal, scale, cap,
        BLOCK, BN, False, PAGE, K_ROWS, V_ROWS, LEFT, RIGHT, CHUNK, CAUSAL,
        True, True, SOFTCAP, 1,
    )  # fmt: skip
    return m, total, acc


@triton.jit
def _stretch(  # size: calls of two functions
    q1,
    q2,
    m1,
    total1,
    acc1,
    m2,
    total2,
    acc2,
    k_desc,
    v_desc,
    table,
    k_row,
    v_row,
    k_col,
    v_col,
    origin,
    stop,
    top,
    bottom1,
    bottom2,
    num_keys,
    is_causal,
    scale,
    cap,
    BLOCK: tl.constexpr,
    BN: tl.constexpr,
    TWO: tl.constexpr,
    PAGE: tl.constexpr,
    K_ROWS: tl.constexpr,
    V_ROWS: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    CHUNK: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_LAST: tl.constexpr,
    SOFTCAP: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Attend to the keys [origin, stop) as far as rows see them, in tiles counted from `origin`.

    Tiles before the window of every row are left out, as those behind; the ones that all rows see
    run without a mask. Rows are at `top` to `bottom1`, those of the second block to `bottom2`.
    HAS_LAST says whether rows differ in the last key that they see.
    """
    HAS_FIRST: tl.constexpr = LEFT >= 0 or CHUNK > 0
    begin, whole_end = bounds_of(top, num_keys, is_causal, LEFT, RIGHT, CHUNK, CAUSAL)
    last, end1 = bounds_of(bottom1, num_keys, is_causal, LEFT, RIGHT, CHUNK, CAUSAL)
    end1 = tl.minimum(end1, stop)
    end2 = end1
    if TWO:
        last, end2 = bounds_of(bottom2, num_keys, is_causal, LEFT, RIGHT, CHUNK, CAUSAL)
        end2 = tl.minimum(end2, stop)
    tail = origin + (stop - origin) // BN * BN
    begin = origin + tl.maximum(begin - origin, 0) // BN * BN
    whole_begin = begin
    if HAS_FIRST:
        whole_begin = origin + (tl.maximum(last - origin, 0) + BN - 1) // BN * BN
        whole_begin = tl.minimum(whole_begin, tail)
    whole_end = origin + tl.maximum(tl.minimum(whole_end, stop) - origin, 0) // BN * BN
    whole_end = tl.maximum(whole_end, whole_begin)
    if HAS_FIRST:
        end = tl.minimum(whole_begin, tl.maximum(end1, end2))
        m1, total1, acc1, m2, total2, acc2 = _pass(
            q1, q2, m1, total1, acc1, m2, total2, acc2, k_desc, v_desc, table,
            k_row, v_row, k_col, v_col, begin, end, stop,
            top, num_keys, is_causal, scale, cap,
            BLOCK, BN, TWO, PAGE, K_ROWS, V_ROWS, LEFT, RIGHT, CHUNK, CAUSAL,
            True, False, SOFTCAP, STAGES,
        )  # fmt: skip
    m1, total1, acc1, m2, total2, acc2 = _pass(
        q1, q2, m1, total1, acc1, m2, total2, acc2, k_desc, v_desc, table,
        k_row, v_row, k_col, v_col, whole_begin, whole_end, stop,
        top, num_keys, is_causal, scale, cap,
        BLOCK, BN, TWO, PAGE, K_ROWS, V_ROWS, LEFT, RIGHT, CHUNK, CAUSAL,
        False, False, SOFTCAP, STAGES,
    )  # fmt: skip
    m1, total1, acc1 = _edges(
        q1, m1, total1, acc1, k_desc, v_desc, table, k_row, v_row, k_col, v_col,
        whole_end, tail, end1, stop, top, num_keys, is_causal, scale, cap,
        BLOCK, BN, PAGE, K_ROWS, V_ROWS, LEFT, RIGHT, CHUNK, CAUSAL, HAS_LAST, SOFTCAP, STAGES,
    )  # fmt: skip
    if TWO:
        m2, total2, acc2 = _edges(
            q2, m2, total2, acc2, k_desc, v_desc, table, k_row, v_row, k_col, v_col,
            whole_end, tail, end2, stop, top + BLOCK, num_keys, is_causal, scale, cap,
            BLOCK, BN, PAGE, K_ROWS, V_ROWS, LEFT, RIGHT, CHUNK, CAUSAL, HAS_LAST, SOFTCAP, STAGES,
        )  # fmt: skip
    return m1, total1, acc1, m2, total2, acc2


@triton.jit
def _write(
    out_ptr, lse_ptr, row, live, m, total, acc, sink, v_scale,
    DV: tl.constexpr, O_TOKEN: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    out, lse = finish(m, total, acc * v_scale, sink, SINKS)
    to = out_ptr + row.to(tl.int64)[:, None] * O_TOKEN + tl.arange(0, DV)[None, :]
    tl.store(to, out.to(out_ptr.dtype.element_ty), mask=live[:, None])
    if lse_ptr is not None:
        tl.store(lse_ptr + row, lse, mask=live)


@triton.jit(do_not_specialize=["num_reqs", "section_heads", "table_stride", "lse_stride"])
def prompt(  # size: one algorithm
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
    HQ: tl.constexpr,
    HK: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK: tl.constexpr,
    BN: tl.constexpr,
    TWO: tl.constexpr,
    STAGES: tl.constexpr,
    CONTEXT: tl.constexpr,
    FRESH: tl.constexpr,
    PAGE: tl.constexpr,
    Q_HEAD: tl.constexpr,
    O_TOKEN: tl.constexpr,
    O_HEAD: tl.constexpr,
    K_ROWS: tl.constexpr,
    K_HEAD_ROWS: tl.constexpr,
    K_HEAD: tl.constexpr,
    V_ROWS: tl.constexpr,
    V_HEAD_ROWS: tl.constexpr,
    V_HEAD: tl.constexpr,
    NEW_K_HEAD: tl.constexpr,
    NEW_V_HEAD: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    CHUNK: tl.constexpr,
    CAUSAL: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SCALES: tl.constexpr,
):
    """Attend for a block of query tokens of one query head over all keys that they see.

    Programs: (sections of heads, blocks of the plan, heads of a section), the last fastest: a
    section has the heads whose keys the L2 holds at once. Of a request the last tokens, which see
    most keys, come first. Programs past the plan's blocks do nothing. Absent pointers and
    descriptors are None.

    What the parameters are:

        q_desc: queries (T, heads x D), tiles of (BLOCK, D).
        k_desc: keys of earlier steps, or of all, by rows: with CONTEXT=1 those of a page lie
            K_ROWS after those of the page before, with CONTEXT=2 requests follow one another.
        v_desc: values likewise.
        new_k_desc: the step's keys (T, kv heads x D), or with FRESH=2 those of all requests.
        new_v_desc: values likewise.
        out_ptr: (T, HQ, DV).
        lse_ptr: (HQ, T) float32, natural logarithms.
        blocks_ptr: of `plan_blocks`.
        table_ptr: (B, M) int32 block ids, with CONTEXT=1.
        lens_ptr: (B,) int32 keys of each request; with FRESH=2 (B + 1,) prefix sums.
        query_starts: (B + 1,) int32.
        causal_ptr: (B,) bytes, with CAUSAL=2.
        sinks_ptr: (HQ,) float32.
        k_scale_ptr: float32, (1,) or (HK,) by SCALES.
        v_scale_ptr: the same of values.
        num_reqs: B.
        section_heads: query heads of a section; they divide HQ.
        table_stride: of the block table.
        lse_stride: of a head's LSEs.
        scale: factor on q.k, above 0, times log2(e); with SOFTCAP divided by the cap instead.
        v_scale: factor on the output.
        cap: with SOFTCAP the cap times log2(e).
        TWO: whether a program has two blocks.
        CONTEXT: 0 none, 1 pages of at least BN keys, 2 rows.
        FRESH: 0 none, 1 the step's keys, which are then not read from the context, 2 all keys.
        SCALES: 0 none, 1 per tensor, 2 per kv head.
    """
    num_blocks = tl.load(blocks_ptr)
    in_section = num_blocks * section_heads
    pid = tl.program_id(0)
    if pid >= num_blocks * HQ:
        return
    rest = pid % in_section
    head = pid // in_section * section_heads + rest % section_heads
    kv_head = head // (HQ // HK)
    record = blocks_ptr + _HEADER + num_reqs + 2 * (rest // section_heads)
    b = tl.load(record)
    m0 = tl.load(record + 1)
    q0 = tl.load(query_starts + b)
    num_rows = tl.load(query_starts + b + 1) - q0
    if FRESH == 2:
        new_row = tl.load(lens_ptr + b)
        num_keys = tl.load(lens_ptr + b + 1) - new_row
        split = 0
    else:
        num_keys = tl.load(lens_ptr + b)
        split = num_keys
        new_row = 0
        if FRESH == 1:
            split = tl.maximum(num_keys - num_rows, 0)  # padded rows have no keys at all
            new_row = q0 - split
    past = num_keys - num_rows
    is_causal = False
    if CAUSAL == 2:
        is_causal = tl.load(causal_ptr + b) != 0
    if SCALES == 1:
        scale = scale * tl.load(k_scale_ptr)
        v_scale = v_scale * tl.load(v_scale_ptr)
    if SCALES == 2:
        scale = scale * tl.load(k_scale_ptr + kv_head)
        v_scale = v_scale * tl.load(v_scale_ptr + kv_head)

    q1 = q_desc.load([q0 + m0, head * Q_HEAD])
    m1 = row_start(BLOCK)
    total1 = tl.zeros([BLOCK], tl.float32)
    acc1 = tl.zeros([BLOCK, DV], tl.float32)
    q2, m2, total2, acc2 = 0.0, 0.0, 0.0, 0.0
    if TWO:
        q2 = q_desc.load([q0 + m0 + BLOCK, head * Q_HEAD])
        m2 = row_start(BLOCK)
        total2 = tl.zeros([BLOCK], tl.float32)
        acc2 = tl.zeros([BLOCK, DV], tl.float32)
    bottom1 = past + tl.minimum(m0 + BLOCK, num_rows) - 1
    bottom2 = past + tl.minimum(m0 + 2 * BLOCK, num_rows) - 1
    HAS_LAST: tl.constexpr = CAUSAL > 0 or RIGHT >= 0
    CAPPING: tl.constexpr = (1 if lse_ptr is None else 2) if SOFTCAP else 0
    if CONTEXT > 0:
        table = table_ptr
        k_row = kv_head * K_HEAD_ROWS
        v_row = kv_head * V_HEAD_ROWS
        if CONTEXT == 1:
            table = table_ptr + b.to(tl.int64) * table_stride
        else:
            k_row = tl.load(blocks_ptr + _HEADER + b)
            v_row = k_row
        m1, total1, acc1, m2, total2, acc2 = _stretch(
            q1, q2, m1, total1, acc1, m2, total2, acc2, k_desc, v_desc, table,
            k_row, v_row, kv_head * K_HEAD, kv_head * V_HEAD, 0, split,
            past + m0, bottom1, bottom2, num_keys, is_causal,
            scale, cap, BLOCK, BN, TWO, PAGE if CONTEXT == 1 else 0, K_ROWS, V_ROWS,
            LEFT, RIGHT, CHUNK, CAUSAL, HAS_LAST and FRESH == 0, CAPPING, STAGES,
        )  # fmt: skip
    if FRESH > 0:
        m1, total1, acc1, m2, total2, acc2 = _stretch(
            q1, q2, m1, total1, acc1, m2, total2, acc2, new_k_desc, new_v_desc, blocks_ptr,
            new_row, new_row, kv_head * NEW_K_HEAD, kv_head * NEW_V_HEAD, split, num_keys,
            past + m0, bottom1, bottom2, num_keys, is_causal,
            scale, cap, BLOCK, BN, TWO, 0, K_ROWS, V_ROWS, LEFT, RIGHT, CHUNK, CAUSAL,
            HAS_LAST, CAPPING, STAGES,
        )  # fmt: skip

    sink = 0.0
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head)
    out = out_ptr + head * O_HEAD
    lse = lse_ptr
    if lse_ptr is not None:
        lse = lse_ptr + head.to(tl.int64) * lse_stride
    if CAPPING == 1:
        m1 += cap
        if TWO:
            m2 += cap
    SINKS: tl.constexpr = sinks_ptr is not None
    row = m0 + tl.arange(0, BLOCK)
    _write(out, lse, q0 + row, row < num_rows, m1, total1, acc1, sink, v_scale, DV, O_TOKEN, SINKS)
    if TWO:
        row += BLOCK
        live = row < num_rows
        _write(out, lse, q0 + row, live, m2, total2, acc2, sink, v_scale, DV, O_TOKEN, SINKS)


def variants(arch: str) -> Iterator[KernelVariant]:
    """Yield how the kernel is launched on an architecture; nowhere without tensor descriptors."""
    yield from prompt_variants(prompt, arch)
