"""Sinks that enter a softmax's denominator after the kernel ran."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["correct_rounded", "with_sinks"]


def with_sinks(output: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Put sinks (Hq,) into the denominator of an output (T, Hq, Dv), in place.

    Args:
        output: without sinks; rows without keys are 0.
        lse: (Hq, T), without sinks; such rows are -inf.
        sinks: float32.

    Returns:
        The LSE with them.
    """
    whole = torch.logaddexp(lse, sinks[:, None])
    factor = (lse - whole).exp().masked_fill_(whole == -math.inf, 0.0)
    output.mul_(factor.T[..., None])
    return whole


def correct_rounded(output: Tensor, without: Tensor, sinks: Tensor, rounded: Tensor) -> None:
    """Put right in place an output (T, Hq, Dv) whose sinks were rounded.

    With Z the denominator of the keys and r a rounded sink s, the output is A / (Z + exp(r)), and
    A / Z without sinks: their quotient is the keys' share q = Z / (Z + exp(r)), taken from all
    columns of a row. A / (Z + exp(s)) is then output / (q + (1 - q) * exp(s - r)). Since s - r is a
    rounding error, an error of q enters by its product with that alone.

    Args:
        output: with the rounded sinks.
        without: without any.
        sinks: (Hq,) float32.
        rounded: (Hq,), what the kernel was given.
    """
    plain = without.float()
    share = (output.float() * plain).sum(-1) / plain.square().sum(-1)
    share = share.nan_to_num_(nan=1.0).clamp_(0.0, 1.0)
    shift = (sinks - rounded.float()).expm1()
    output.div_((1.0 + (1.0 - share) * shift)[..., None])
