"""Sinks for kernels that take them in a narrow dtype, and what that leaves to be put right."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["RoundedSinks"]


class RoundedSinks:
    """The sinks of a layer as a kernel takes them.

    Sinks that the kernel's dtype holds exactly are converted once; of others the kernel gets
    rounded ones, and output and LSE are corrected by the difference in the denominator, so that a
    graph may replay with other sinks in the same place.
    """

    def __init__(self, dtype: torch.dtype | None) -> None:
        """Start with nothing seen.

        Args:
            dtype: that the kernel takes; None: sinks as they are.
        """
        self._dtype = dtype
        self._seen: Tensor | None = None
        self._seen_version = 0
        self._converted: Tensor | None = None

    def of(self, sinks: Tensor | None) -> tuple[Tensor | None, bool]:
        """Return what the kernel gets, and whether that is exact."""
        if sinks is None or self._dtype is None:
            return sinks, True
        version = 0 if sinks.is_inference() else sinks._version
        if sinks is not self._seen or version != self._seen_version:
            self._look(sinks, version, self._dtype)
        if self._converted is not None:
            return self._converted, True
        return sinks.to(self._dtype), False

    def _look(self, sinks: Tensor, version: int, dtype: torch.dtype) -> None:
        """Compare contents, once: that waits for the device, which a capture must not."""
        self._converted = None
        if sinks.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        rounded = sinks.to(dtype)
        self._seen, self._seen_version = sinks, version
        if bool((rounded.float() == sinks).all()):
            self._converted = rounded

    @staticmethod
    def correct(output: Tensor, lse: Tensor, sinks: Tensor, rounded: Tensor) -> Tensor:
        """Put the output (T, Hq, Dv) right in place, and return the right LSE (Hq, T).

        Of L = log(Z + exp(r)) with a rounded sink r, the right one is
        L + log1p(exp(r - L) * expm1(s - r)). A row without keys has L = -inf, and one whose keys
        weigh nothing beside the sink +inf, since the kernel scales by the largest key.
        """
        near = rounded.float()[:, None]
        lse = lse.masked_fill(lse == math.inf, -math.inf)
        shift = (near - lse).exp() * (sinks[:, None] - near).expm1()
        exact = torch.where(lse == -math.inf, sinks[:, None], lse + shift.log1p())
        output.mul_((lse - exact).exp().T[..., None])
        return exact
