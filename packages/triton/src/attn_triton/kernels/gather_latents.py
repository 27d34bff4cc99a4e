"""Entries of a cache of latents as dense rows, widened on the way: what prefills read of it."""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl

from attn_triton.variants import KernelVariant

__all__ = ["gather_latents", "variants"]


@triton.jit(do_not_specialize=["num_rows"])
def gather_latents(
    cache_ptr,
    slots_ptr,
    rows_ptr,
    scale_ptr,
    num_rows: tl.int32,
    scale,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    IS_SCALED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Copy ROWS entries per program.

    What the parameters are:

        cache_ptr: (blocks, PAGE, WIDTH) by strides.
        slots_ptr: (num_rows,) int64.
        rows_ptr: (num_rows, WIDTH).
        scale_ptr: float32, one element, or None where `scale` is it.
        scale: with IS_SCALED entry = stored * scale, multiplied in float32.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = row < num_rows
    slot = tl.load(slots_ptr + row, mask=live, other=0)
    d = tl.arange(0, PADDED)
    inside = live[:, None] & (d < WIDTH)[None, :]
    at = slot // PAGE * BLOCK_STRIDE + slot % PAGE * TOKEN_STRIDE
    entry = tl.load(cache_ptr + (at[:, None] + d[None, :]), mask=inside, other=0.0)
    if IS_SCALED:
        if scale_ptr is not None:
            scale = tl.load(scale_ptr)
        entry = entry.to(tl.float32) * scale
    to = row.to(tl.int64) * WIDTH
    tl.store(
        rows_ptr + (to[:, None] + d[None, :]), entry.to(rows_ptr.dtype.element_ty), mask=inside
    )


def variants(arch: str) -> Iterator[KernelVariant]:
    """Yield how entries are gathered on an architecture."""
    yield _variant("bf16", "*bf16", is_scaled=False)
    if arch in ("sm_90", "sm_100", "sm_120"):
        yield _variant("e4m3", "*fp8e4nv", is_scaled=True)


def _variant(name: str, stored: str, *, is_scaled: bool) -> KernelVariant:
    return KernelVariant(
        name=f"gather-latents-{name}",
        kernel=gather_latents,
        signature={
            "cache_ptr": stored,
            "slots_ptr": "*i64",
            "rows_ptr": "*bf16",
            "scale_ptr": "*fp32" if is_scaled else "constexpr",
            "num_rows": "i32",
            "scale": "fp32",
        },
        constants={
            "WIDTH": 576,
            "PADDED": 1024,
            "PAGE": 64,
            "BLOCK_STRIDE": 64 * 576,
            "TOKEN_STRIDE": 576,
            "IS_SCALED": is_scaled,
            "ROWS": 4,
        },
        is_main=not is_scaled,
    )
