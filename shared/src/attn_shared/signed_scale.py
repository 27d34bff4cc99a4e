"""The sign of a scale, kept apart from it."""

from __future__ import annotations

from torch import Tensor

from attn_shared.alignment import aligned

__all__ = ["Scale"]


class Scale:
    """The factor on the logits, for kernels that find the largest logit before they scale.

    A negative factor would make the smallest of it. So the kernel gets a positive one, and the
    query the sign; where the factor is 0 the query is 0.

    Attributes:
        value: what the kernel gets.
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
        return aligned(query if self._sign > 0 else query * self._sign)
