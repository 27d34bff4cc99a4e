"""Twins that are wrong about logits, the denominator and the LSE."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from attn_conformance.reference_backend import REFERENCE_CAPABILITY, ReferenceCall, ReferenceImpl
from attn_conformance.twins.twin import Twin
from attn_shared.reference import AttentionOptions, ReferenceResult

__all__ = [
    "AlibiAway",
    "CappedBeforeScale",
    "DroppedSinks",
    "DroppedSoftcap",
    "LseInBits",
    "LseWithoutSink",
    "OverflowingSoftcap",
    "OwnScale",
    "ShiftedLse",
    "ShortMemory",
    "SinkPerSplit",
]


class OwnScale(Twin):
    """Takes 1 / sqrt(D) whatever the layer says."""

    breaks = ("scale",)

    class impl(ReferenceImpl):
        """See above."""

        def options(self, call: ReferenceCall) -> AttentionOptions:
            """Assume the scale."""
            return replace(super().options(call), scale=self.spec.head_size**-0.5)


class DroppedSoftcap(Twin):
    """Accepts a softcap and drops it."""

    breaks = ("softcap",)

    class impl(ReferenceImpl):
        """See above."""

        def options(self, call: ReferenceCall) -> AttentionOptions:
            """Drop it."""
            return replace(super().options(call), softcap=None)


class CappedBeforeScale(Twin):
    """Caps the product before it is scaled."""

    breaks = ("softcap", "combinations")

    class impl(ReferenceImpl):
        """See above."""

        def options(self, call: ReferenceCall) -> AttentionOptions:
            """Scale * cap * tanh(x / cap) is a cap of scale * cap on scale * x."""
            options = super().options(call)
            if options.softcap is None:
                return options
            return replace(options, softcap=options.softcap * abs(options.scale))


class OverflowingSoftcap(Twin):
    """Builds tanh from exp(x) and exp(-x) in float32: NaN past |x / cap| of about 88."""

    breaks = ("large_logits",)

    class impl(ReferenceImpl):
        """See above."""

        def attend(self, call: ReferenceCall) -> ReferenceResult:
            """Spoil rows whose products pass the exponent."""
            result = super().attend(call)
            if self.spec.softcap is None:
                return result
            norms = call.query[: result.num_tokens].float().norm(dim=-1)
            is_over = norms * abs(self.spec.scale) / self.spec.softcap > 88
            result.output[: result.num_tokens][is_over] = torch.nan
            return result


class AlibiAway(Twin):
    """Adds the bias instead of taking it away."""

    breaks = ("alibi",)

    class impl(ReferenceImpl):
        """See above."""

        def options(self, call: ReferenceCall) -> AttentionOptions:
            """Turn the sign."""
            options = super().options(call)
            if options.alibi_slopes is None:
                return options
            return replace(options, alibi_slopes=-options.alibi_slopes)


class DroppedSinks(Twin):
    """Accepts sinks and drops them."""

    breaks = ("sinks",)

    class impl(ReferenceImpl):
        """See above."""

        def options(self, call: ReferenceCall) -> AttentionOptions:
            """Drop them."""
            return replace(super().options(call), sinks=None)


class SinkPerSplit(Twin):
    """Counts a sink once for each 64 keys, as a split kernel does that adds it in every split."""

    breaks = ("long_context",)

    class impl(ReferenceImpl):
        """See above."""

        def options(self, call: ReferenceCall) -> AttentionOptions:
            """N equal logits are one that is ln(n) higher."""
            options = super().options(call)
            if options.sinks is None:
                return options
            splits = max(1, -(-call.common.max_seq_len // 64))
            return replace(options, sinks=options.sinks + math.log(splits))


class ShortMemory(Twin):
    """Sees the last 256 keys only."""

    breaks = ("long_context",)

    class impl(ReferenceImpl):
        """See above."""

        def options(self, call: ReferenceCall) -> AttentionOptions:
            """A window nobody asked for."""
            options = super().options(call)
            left, right = options.window
            return replace(options, window=(min(255, left or 255), right))


class LseInBits(Twin):
    """Returns log2 and says that it is ln."""

    breaks = ("lse", "merged_halves")

    class impl(ReferenceImpl):
        """See above."""

        def attend(self, call: ReferenceCall) -> ReferenceResult:
            """Change the base."""
            result = super().attend(call)
            return replace(result, lse=result.lse / math.log(2))


class LseWithoutSink(Twin):
    """Leaves the sink out of the LSE, though the output was divided by it."""

    breaks = ("lse",)

    class impl(ReferenceImpl):
        """See above."""

        def attend(self, call: ReferenceCall) -> ReferenceResult:
            """Take the sink's share out again."""
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
        """See above."""

        def attend(self, call: ReferenceCall) -> ReferenceResult:
            """Shift each row by something of its own."""
            result = super().attend(call)
            rows = torch.arange(result.lse.shape[1], dtype=torch.float64)
            return replace(result, lse=result.lse + 0.01 * (rows + 1))


class DropsUndeclaredSinks(Twin):
    """Declares no sinks, and accepts a layer that has them."""

    breaks = ("unsupported_option",)
    served = replace(REFERENCE_CAPABILITY, sinks=REFERENCE_CAPABILITY.sinks.NO)

    class impl(ReferenceImpl):
        """See above."""

        def check_layer(self, spec: object) -> None:
            """Accept anything."""

        def options(self, call: ReferenceCall) -> AttentionOptions:
            """Drop them."""
            return replace(super().options(call), sinks=None)
