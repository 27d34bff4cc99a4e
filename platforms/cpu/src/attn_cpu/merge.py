"""Merging two partial results in one pass over memory; the same answer as `attn_shared.merge`."""

from __future__ import annotations

import torch
from torch import Tensor

from attn_cpu._ops import call, op
from attn_cpu._vendor.attn_cpu_kernels import load
from attn_shared.gradients import require_no_gradients

__all__ = ["merge_attn_states"]


def merge_attn_states(
    output_a: Tensor,
    lse_a: Tensor,
    output_b: Tensor,
    lse_b: Tensor,
    *,
    output: Tensor | None = None,
    output_lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Merge two partial results over disjoint keys.

    An LSE of -inf or +inf marks a side without keys, which takes no part; NaN spreads.

    Args:
        output_a: (T, H, D), float32, bfloat16 or float16.
        lse_a: (H, T) float32, natural log.
        output_b: (T, H, D), of output_a's dtype.
        lse_b: (H, T) float32.
        output: (T, H, D) to write to, or None.
        output_lse: (H, T) to write to, or None.

    Returns:
        Output (T, H, D) and LSE (H, T).

    Raises:
        InvalidInputError: shapes, dtypes, strides or places do not fit.
        UnsupportedOptionError: a gradient is asked for.
        ImportError: the kernels are not there, or do not load.
    """
    given = {"output_a": output_a, "lse_a": lse_a, "output_b": output_b, "lse_b": lse_b}
    require_no_gradients("attn_cpu.merge", given | {"output": output, "output_lse": output_lse})
    load()
    merged = torch.empty_like(output_a) if output is None else output
    lse = torch.empty_like(lse_a) if output_lse is None else output_lse
    call(op("merge_attn_states"), merged, lse, output_a, lse_a, output_b, lse_b)
    return merged, lse
