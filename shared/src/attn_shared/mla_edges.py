"""What kernels over latents say otherwise than the contract, put right beside the call."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attn_shared.alignment import aligned

__all__ = ["Scale", "to_contract_lse"]


class Scale:
    """The factor on the logits, for kernels that find the largest logit before they scale.

    Attributes:
        value: what the kernel gets, which is positive.
    """

    def __init__(self, scale: float) -> None:
        """Keep the sign of a scale apart."""
        self._sign = (scale > 0) - (scale < 0)
        self.value = abs(scale) or 1.0

    def signed(self, query: Tensor) -> Tensor:
        """Return a query (T, H, D) with the sign; a copy where the scale is not above 0."""
        return query if self._sign > 0 else query * self._sign

    def query(self, query: Tensor) -> Tensor:
        """Return a query (T, H, D) with the sign, as kernels can load it; a copy where need be."""
        return aligned(query) if self._sign > 0 else self.signed(query)


def to_contract_lse(lse: Tensor, *, is_log2: bool = False) -> Tensor:
    """Return an LSE as a natural logarithm in which a row without keys is -inf.

    Args:
        lse: float32, of any shape; +inf too stands for a row without keys.
        is_log2: it is a logarithm to base 2.
    """
    if is_log2:
        lse = lse * math.log(2)
    return torch.where(lse == math.inf, -math.inf, lse)
