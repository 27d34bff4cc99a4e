"""Twins that are wrong about logits and the denominator."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from attn_conformance.reference_backend import ReferenceCall, ReferenceImpl
from attn_conformance.twins.by_request import ByRequest, OneRequest
from attn_conformance.twins.twin import Twin
from attn_shared.reference import AttentionOptions, ReferenceResult

__all__ = ["TWINS"]

_LARGEST_EXPONENT = 88.0  # exp of more overflows float32


class OwnScale(Twin):
    """Takes 1 / sqrt(D) whatever the layer says."""

    breaks = ("scale",)

    class impl(ReferenceImpl):
        def options(self, call: ReferenceCall) -> AttentionOptions:
            return replace(super().options(call), scale=self.spec.head_size**-0.5)


class PositiveScale(Twin):
    """Takes the maximum before it scales, which a negative scale turns into a minimum."""

    breaks = ("scale",)

    class impl(ReferenceImpl):
        def options(self, call: ReferenceCall) -> AttentionOptions:
            options = super().options(call)
            return replace(options, scale=abs(options.scale))


class DroppedSoftcap(Twin):
    """Accepts a softcap and drops it."""

    breaks = ("softcap",)

    class impl(ReferenceImpl):
        def options(self, call: ReferenceCall) -> AttentionOptions:
            return replace(super().options(call), softcap=None)


class CappedBeforeScale(Twin):
    """Caps the product before it is scaled: a cap of scale * cap on scale * x."""

    breaks = ("softcap", "combinations")

    class impl(ReferenceImpl):
        def options(self, call: ReferenceCall) -> AttentionOptions:
            options = super().options(call)
            if options.softcap is None:
                return options
            return replace(options, softcap=options.softcap * abs(options.scale))


class OverflowingSoftcap(Twin):
    """Builds tanh from exp(x) and exp(-x) in float32: NaN past |x / cap| of about 88."""

    breaks = ("softcap",)

    class impl(ReferenceImpl):
        def attend(self, call: ReferenceCall) -> ReferenceResult:
            result = super().attend(call)
            if self.spec.softcap is None:
                return result
            norms = call.query[: result.num_tokens].float().norm(dim=-1)
            is_over = norms * abs(self.spec.scale) / self.spec.softcap > _LARGEST_EXPONENT
            result.output[: result.num_tokens][is_over] = torch.nan
            return result


class AlibiAway(Twin):
    """Adds the bias instead of taking it away."""

    breaks = ("alibi", "combinations")

    class impl(ReferenceImpl):
        def options(self, call: ReferenceCall) -> AttentionOptions:
            options = super().options(call)
            if options.alibi_slopes is None:
                return options
            return replace(options, alibi_slopes=-options.alibi_slopes)


class AlibiFromTheFirstKey(Twin):
    """Adds slope * j, which differs by a constant per row: the output is right, the LSE is not."""

    breaks = ("alibi", "lse")

    class impl(ByRequest):
        def attend_one(self, call: ReferenceCall, request: OneRequest) -> ReferenceResult:
            result = super().attend_one(call, request)
            slopes = call.layer.alibi_slopes
            if slopes is None:
                return result
            shift = slopes.double()[:, None] * self.positions(request)[None]
            return replace(result, lse=result.lse + shift)


class DroppedSinks(Twin):
    """Accepts sinks and drops them."""

    breaks = ("sinks", "combinations")

    class impl(ReferenceImpl):
        def options(self, call: ReferenceCall) -> AttentionOptions:
            return replace(super().options(call), sinks=None)


class ScaledSinks(Twin):
    """Scales a sink as if it were a product."""

    breaks = ("sinks",)

    class impl(ReferenceImpl):
        def options(self, call: ReferenceCall) -> AttentionOptions:
            options = super().options(call)
            if options.sinks is None:
                return options
            return replace(options, sinks=options.sinks * options.scale)


class CappedSinks(Twin):
    """Caps a sink as if it were a product."""

    breaks = ("combinations",)

    class impl(ReferenceImpl):
        def options(self, call: ReferenceCall) -> AttentionOptions:
            options = super().options(call)
            if options.sinks is None or options.softcap is None:
                return options
            capped = options.softcap * torch.tanh(options.sinks / options.softcap)
            return replace(options, sinks=capped)


class SinkPerSplit(Twin):
    """Counts a sink once for each 512 keys, as a split kernel does that adds it in every split."""

    breaks = ("sinks",)

    class impl(ReferenceImpl):
        def options(self, call: ReferenceCall) -> AttentionOptions:
            options = super().options(call)
            if options.sinks is None:
                return options
            splits = max(1, -(-call.common.max_seq_len // 512))
            return replace(options, sinks=options.sinks + math.log(splits))


class ShortMemory(Twin):
    """Sees the last 512 keys only: the other splits are never merged."""

    breaks = ("long_context",)

    class impl(ReferenceImpl):
        def options(self, call: ReferenceCall) -> AttentionOptions:
            options = super().options(call)
            left, right = options.window
            return replace(options, window=(min(511, 511 if left is None else left), right))


class NoMaximum(Twin):
    """Takes exponentials in float32 without the row's maximum: inf / inf, or 0 / 0."""

    breaks = ("large_logits",)

    class impl(ReferenceImpl):
        def attend(self, call: ReferenceCall) -> ReferenceResult:
            result = super().attend(call)
            is_out = result.lse.isfinite() & (result.lse.abs() > _LARGEST_EXPONENT)
            result.output[is_out.T] = torch.nan
            return result


TWINS: tuple[type[Twin], ...] = (
    OwnScale,
    PositiveScale,
    DroppedSoftcap,
    CappedBeforeScale,
    OverflowingSoftcap,
    AlibiAway,
    AlibiFromTheFirstKey,
    DroppedSinks,
    ScaledSinks,
    CappedSinks,
    SinkPerSplit,
    ShortMemory,
    NoMaximum,
)
