"""Combine two partial attention results by their natural-log LSEs."""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl

from attn_triton.variants import KernelVariant

__all__ = ["merge_states", "variants"]


@triton.jit
def merge_states(  # size: one formula, and a parameter for each stride
    first,
    first_lse,
    second,
    second_lse,
    merged,
    merged_lse,
    num_rows: tl.int32,
    first_token: tl.int64,
    first_head: tl.int64,
    second_token: tl.int64,
    second_head: tl.int64,
    merged_token: tl.int64,
    merged_head: tl.int64,
    first_lse_head: tl.int64,
    first_lse_token: tl.int64,
    second_lse_head: tl.int64,
    second_lse_token: tl.int64,
    merged_lse_head: tl.int64,
    merged_lse_token: tl.int64,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    VECTOR: tl.constexpr,
    FIRST_STEP: tl.constexpr,
    SECOND_STEP: tl.constexpr,
    MERGED_STEP: tl.constexpr,
    IS_DOUBLE: tl.constexpr,
    IN_PLACE: tl.constexpr,
):
    """Merge ROWS pairs of a token and a head per program.

    With shares p = exp(lse - peak) / total the output is the sum of p * output, and the LSE is
    peak + log(total). An infinite LSE is that of a side without keys, whose output is left out.
    Strides of outputs come in units of VECTOR elements, those of LSEs in elements. IN_PLACE: the
    merged side is the first one.
    """
    wide: tl.constexpr = tl.float64 if IS_DOUBLE else tl.float32
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = rows < num_rows
    tokens = (rows // HEADS).to(tl.int64)
    heads = rows % HEADS
    first_at = heads * first_lse_head + tokens * first_lse_token
    second_at = heads * second_lse_head + tokens * second_lse_token
    a = tl.load(first_lse + first_at, mask=is_row, other=float("-inf"))
    b = tl.load(second_lse + second_at, mask=is_row, other=float("-inf"))
    # Both outputs are asked for before an LSE has come that may say that one is not needed.
    columns = tl.arange(0, WIDTH)[None, :]
    inside = is_row[:, None] & (columns < SIZE)
    at = (tokens * first_token + heads * first_head) * VECTOR
    x = tl.load(first + at[:, None] + columns * FIRST_STEP, mask=inside, other=0.0)
    at = (tokens * second_token + heads * second_head) * VECTOR
    y = tl.load(second + at[:, None] + columns * SECOND_STEP, mask=inside, other=0.0)

    if IN_PLACE:
        # Every warp loads the LSEs of its own rows, and the first one stores those of all rows.
        # Without a barrier it may store before the others have loaded.
        tl.debug_barrier()

    a = tl.where(tl.abs(a) == float("inf"), float("-inf"), a)
    b = tl.where(tl.abs(b) == float("inf"), float("-inf"), b)
    has_a = a != float("-inf")
    has_b = b != float("-inf")
    peak = tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    shift = tl.where(peak == float("-inf"), 0.0, peak)
    weight_a = tl.exp(a - shift)
    weight_b = tl.exp(b - shift)
    total = tl.where(peak == float("-inf"), 1.0, weight_a + weight_b)
    # Adding log(1) = +0 would turn an LSE of -0 into +0, which is no longer the same bits.
    lse = tl.where(total == 1.0, peak, peak + tl.log(total))
    merged_at = heads * merged_lse_head + tokens * merged_lse_token
    tl.store(merged_lse + merged_at, lse, mask=is_row)

    share_a = (weight_a / total).to(wide)
    share_b = (weight_b / total).to(wide)
    x = x.to(wide) * share_a[:, None]
    y = y.to(wide) * share_b[:, None]
    # Not x + 0 for the only side with keys, which would turn its -0 into +0.
    out = tl.where(has_b[:, None], tl.where(has_a[:, None], x + y, y), x)
    out = tl.where((has_a | has_b)[:, None], out, 0.0)
    at = (tokens * merged_token + heads * merged_head) * VECTOR
    target = merged + at[:, None] + columns * MERGED_STEP
    tl.store(target, out.to(merged.dtype.element_ty), mask=inside)


def variants(arch: str) -> Iterator[KernelVariant]:
    """Yield how states are merged, on every architecture alike: 32 heads of 128 and of 96."""
    del arch
    yield _variant("bf16-d128", "*bf16", 128)
    yield _variant("bf16-d96", "*bf16", 96, is_main=False)
    yield _variant("float32-d128", "*fp32", 128, is_main=False)
    yield _variant("bf16-d128-in-place", "*bf16", 128, in_place=True)


def _variant(
    name: str, element: str, size: int, *, is_main: bool = True, in_place: bool = False
) -> KernelVariant:
    sides, dims = ("first", "second", "merged"), ("token", "head")
    strides = [f"{side}_{dim}" for side in sides for dim in dims]
    strides += [f"{side}_lse_{dim}" for side in sides for dim in dims]
    return KernelVariant(
        name=f"merge-{name}",
        kernel=merge_states,
        signature={
            "first": element,
            "first_lse": "*fp32",
            "second": element,
            "second_lse": "*fp32",
            "merged": element,
            "merged_lse": "*fp32",
            "num_rows": "i32",
            **dict.fromkeys(strides, "i64"),
        },
        constants={
            "HEADS": 32,
            "ROWS": 16,
            "SIZE": size,
            "WIDTH": 128,
            "VECTOR": 8 if element == "*bf16" else 4,
            "FIRST_STEP": 1,
            "SECOND_STEP": 1,
            "MERGED_STEP": 1,
            "IS_DOUBLE": False,
            "IN_PLACE": in_place,
        },
        is_main=is_main,
    )
