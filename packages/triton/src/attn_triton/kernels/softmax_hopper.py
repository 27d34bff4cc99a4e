"""The online softmax of a tile for kernels in Gluon.

Where Triton has no such language the module does not import.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

__all__ = ["soften"]


@gluon.jit
def soften(s, m, total, scale):
    """Return weights of a tile, factors of what was before, and new maxima and sums."""
    top = gl.maximum(m, gl.max(s, 1) * scale)
    p = gl.exp2(s * scale - top[:, None])
    fade = gl.exp2(m - top)
    return p, fade, top, total * fade + gl.sum(p, 1)
