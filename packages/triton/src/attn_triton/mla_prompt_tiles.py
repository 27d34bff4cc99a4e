"""When prefills over latents run on the kernel for Hopper, and in which shape: one pure choice."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attn_shared.arch import Arch
from attn_shared.dtypes import dtype_name
from attn_shared.request import MLADims

__all__ = ["GROUP_ROWS", "MLAPromptTile", "mla_prompt_tile", "plain_because"]

GROUP_ROWS = 64
"""Query rows of each of a program's two groups of warps."""

_WIDTHS = (128, 64, 128)
_HALF_BYTES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class MLAPromptTile:
    """One program's shape.

    Attributes:
        keys: keys per iteration.
        stages: buffers of keys and of values.
        provenance: where the numbers come from.
    """

    keys: int
    stages: int
    provenance: str

    @property
    def rows(self) -> int:
        """Query rows of a program."""
        return 2 * GROUP_ROWS


_HOPPER = MLAPromptTile(
    keys=128,
    stages=2,
    provenance="H200, Triton 3.6.0, bf16, one run, TFLOP/s of 128 heads at 1x4096 and 8x2048, and "
    "of 16 at 1x16384: 587, 486, 677 with 128 keys and 2 stages; 514, 440, 598 with 64 and 4",
)


def plain_because(arch: Arch, dims: MLADims, dtype: torch.dtype, *, has_gluon: bool) -> str | None:
    """Return why prefills run on the portable kernel; None: on the one for Hopper.

    Args:
        arch: of the device.
        dims: widths of the layer.
        dtype: of queries.
        has_gluon: Triton has the language of the kernel.
    """
    widths = (dims.qk_nope_head_dim, dims.qk_rope_head_dim, dims.v_head_dim)
    if arch.family != "hopper":
        return f"the other is for Hopper, and this is {arch.canonical}"
    if widths != _WIDTHS:
        found, wanted = (" ".join(map(str, each)) for each in (widths, _WIDTHS))
        return f"widths {found} (nope, rope, v); the kernel for Hopper has {wanted}"
    if dtype.itemsize != _HALF_BYTES:
        return f"{dtype_name(dtype)}; the kernel for Hopper has bfloat16 and float16"
    if not has_gluon:
        return "Triton has no Gluon as of 3.6, in which the kernel for Hopper is written"
    return None


def mla_prompt_tile() -> MLAPromptTile:
    """Return the shape of the kernel for Hopper."""
    return _HOPPER
