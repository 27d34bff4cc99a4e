"""Two kernels to try the interpreter with."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def product(a, b, out):
    rows = tl.arange(0, 16)[:, None]
    columns = tl.arange(0, 16)[None, :]
    offsets = rows * 16 + columns
    tl.store(out + offsets, tl.dot(tl.load(a + offsets), tl.load(b + offsets)))


@triton.jit
def copy(source, out):
    offsets = tl.arange(0, 8)
    tl.store(out + offsets, tl.load(source + offsets).to(out.dtype.element_ty))
