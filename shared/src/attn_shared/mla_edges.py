"""What kernels over latents say otherwise than the contract, put right beside the call."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["to_contract_lse"]


def to_contract_lse(lse: Tensor, *, is_log2: bool = False) -> Tensor:
    """Return an LSE as a natural logarithm in which a row without keys is -inf.

    Args:
        lse: float32, of any shape; +inf too stands for a row without keys.
        is_log2: it is a logarithm to base 2.
    """
    if is_log2:
        lse = lse * math.log(2)
    return torch.where(lse == math.inf, -math.inf, lse)
