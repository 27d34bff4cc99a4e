"""Twins whose output is right, and whose LSE is not."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from attn_conformance.reference_backend import ReferenceCall, ReferenceImpl
from attn_conformance.twins.twin import Twin
from attn_shared.reference import ReferenceResult

__all__ = ["TWINS"]


class LseInBits(Twin):
    """Returns log2 and says that it is ln."""

    breaks = ("lse", "merged_halves")

    class impl(ReferenceImpl):
        def attend(self, call: ReferenceCall) -> ReferenceResult:
            result = super().attend(call)
            return replace(result, lse=result.lse / math.log(2))


class LseCalledBits(Twin):
    """Returns ln and says that it is log2."""

    breaks = ("lse", "merged_halves")

    class impl(ReferenceImpl):
        lse_base_on_e = False


class LseWithoutSink(Twin):
    """Leaves the sink out of the LSE, though the output was divided by it."""

    breaks = ("lse",)

    class impl(ReferenceImpl):
        def attend(self, call: ReferenceCall) -> ReferenceResult:
            result = super().attend(call)
            sinks = call.layer.sinks
            if sinks is None:
                return result
            share = (sinks.double()[:, None] - result.lse).exp()
            return replace(result, lse=result.lse + torch.log1p(-share.clamp(max=1)))


class ShiftedLse(Twin):
    """Returns the LSE without the maximum that the kernel subtracted."""

    breaks = ("lse", "merged_halves")

    class impl(ReferenceImpl):
        def attend(self, call: ReferenceCall) -> ReferenceResult:
            result = super().attend(call)
            rows = torch.arange(result.lse.shape[1], dtype=torch.float64)
            return replace(result, lse=result.lse - 0.01 * (rows + 1))


class LseOfNeighbour(Twin):
    """Writes a head's LSE where the next head's goes."""

    breaks = ("lse", "merged_halves")

    class impl(ReferenceImpl):
        def attend(self, call: ReferenceCall) -> ReferenceResult:
            result = super().attend(call)
            return replace(result, lse=result.lse.roll(1, dims=0))


class HalfPrecisionLse(Twin):
    """Returns the LSE rounded to bfloat16."""

    breaks = ("lse", "merged_halves")

    class impl(ReferenceImpl):
        def attend(self, call: ReferenceCall) -> ReferenceResult:
            result = super().attend(call)
            return replace(result, lse=result.lse.bfloat16().double())


TWINS: tuple[type[Twin], ...] = (
    LseInBits,
    LseCalledBits,
    LseWithoutSink,
    ShiftedLse,
    LseOfNeighbour,
    HalfPrecisionLse,
)
