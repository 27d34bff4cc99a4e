"""Twins that are wrong about who sees whom."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from attn_conformance.reference_backend import ReferenceCall, ReferenceImpl
from attn_conformance.twins.twin import Twin
from attn_shared import reference
from attn_shared.reference import AttentionOptions, ReferenceResult

__all__ = [
    "CausalEncoder",
    "CausalFirstOnly",
    "CausalTopLeft",
    "CrossByDecoderLengths",
    "DroppedChunks",
    "DroppedRanges",
    "OneSidedWindow",
    "RowsFromZero",
    "StrictlyCausal",
    "WindowOneShort",
    "WindowOneWide",
]


class CausalTopLeft(Twin):
    """Aligns the causal mask with the first key, as torch's is_causal does."""

    breaks = ("extend",)

    class impl(ReferenceImpl):
        """See above."""

        def attend_paged(self, call: ReferenceCall) -> ReferenceResult:
            """Attend request by request, rows counted from position 0."""
            return _by_request(self, call, lambda seq_len, query_len: 0)


class RowsFromZero(Twin):
    """Puts a request's rows one position too early."""

    breaks = ("causal", "extend")

    class impl(ReferenceImpl):
        """See above."""

        def attend_paged(self, call: ReferenceCall) -> ReferenceResult:
            """Attend request by request, one position off."""
            return _by_request(self, call, lambda seq_len, query_len: seq_len - query_len - 1)


def _by_request(self: ReferenceImpl, call: ReferenceCall, first: Any) -> ReferenceResult:
    """Attend plain causal requests one by one; others as the reference does."""
    arguments = self.paged_arguments(call)
    right = ReferenceImpl.attend_paged(self, call)
    if arguments["causal"] is not True:
        return right
    views = self.views(call)
    starts, lens = call.common.query_start_loc.tolist(), call.common.seq_lens.tolist()
    for request, seq_len in enumerate(lens):
        start, stop = starts[request], starts[request + 1]
        if not (stop - start > 0 and seq_len > 0 and views.key.dtype == call.query.dtype):
            continue
        size = views.key.shape[1]
        blocks = call.common.block_table[request, : -(-seq_len // size)].long()  # type: ignore[index]
        key, value = (view[blocks].flatten(0, 1)[:seq_len] for view in views[:2])
        positions = torch.arange(stop - start) + first(seq_len, stop - start)
        options = replace(self.options(call), chunk_size=None)
        result = reference.attention(
            call.query[start:stop], key, value, options, query_positions=positions
        )
        right.output[start:stop] = result.output
        right.lse[:, start:stop] = result.lse
    return right


class StrictlyCausal(Twin):
    """A row does not see its own key."""

    breaks = ("causal",)

    class impl(ReferenceImpl):
        """See above."""

        def attend_paged(self, call: ReferenceCall) -> ReferenceResult:
            """Attend one position early."""
            return _by_request(self, call, lambda seq_len, query_len: seq_len - query_len - 1)


class CausalFirstOnly(Twin):
    """Takes the first request's causality for all."""

    breaks = ("per_request_causality",)

    class impl(ReferenceImpl):
        """See above."""

        def paged_arguments(self, call: ReferenceCall) -> dict[str, Any]:
            """One rule for all."""
            arguments = super().paged_arguments(call)
            causal = arguments["causal"]
            if isinstance(causal, torch.Tensor) and len(causal):
                arguments["causal"] = bool(causal[0])
            return arguments


class AlwaysCausal(Twin):
    """Ignores that rows are not causal."""

    breaks = ("non_causal",)

    class impl(ReferenceImpl):
        """See above."""

        def paged_arguments(self, call: ReferenceCall) -> dict[str, Any]:
            """Every row is causal."""
            return {**super().paged_arguments(call), "causal": True}


class _OtherWindow(ReferenceImpl):
    shift = (0, 0)

    def options(self, call: ReferenceCall) -> AttentionOptions:
        """Shift each bounded side."""
        options = super().options(call)
        left, right = (
            None if side is None else max(0, side + by)
            for side, by in zip(options.window, self.shift, strict=True)
        )
        if options.window[1] == 0:
            right = 0
        return replace(options, window=(left, right))


class WindowOneWide(Twin):
    """Keeps W + 1 keys."""

    breaks = ("window", "two_sided_window", "generated")

    class impl(_OtherWindow):
        """See above."""

        shift = (1, 0)


class WindowOneShort(Twin):
    """Keeps W - 1 keys."""

    breaks = ("window", "two_sided_window")

    class impl(_OtherWindow):
        """See above."""

        shift = (-1, 0)


class OneSidedWindow(Twin):
    """Drops the right side of a window."""

    breaks = ("two_sided_window",)

    class impl(ReferenceImpl):
        """See above."""

        def options(self, call: ReferenceCall) -> AttentionOptions:
            """Leave the right side open."""
            options = super().options(call)
            return replace(options, window=(options.window[0], None))


class DroppedRanges(Twin):
    """Ignores multimodal ranges."""

    breaks = ("multimodal_ranges",)

    class impl(ReferenceImpl):
        """See above."""

        def paged_arguments(self, call: ReferenceCall) -> dict[str, Any]:
            """Drop them."""
            return {**super().paged_arguments(call), "mm_prefix_ranges": {}}


class DroppedChunks(Twin):
    """Ignores chunks."""

    breaks = ("chunked_local",)

    class impl(ReferenceImpl):
        """See above."""

        def options(self, call: ReferenceCall) -> AttentionOptions:
            """Drop them."""
            return replace(super().options(call), chunk_size=None)


class CausalEncoder(Twin):
    """Masks an encoder as if it were a decoder."""

    breaks = ("encoder", "encoder_only")

    class impl(ReferenceImpl):
        """See above."""

        def attend_ragged(self, call: ReferenceCall) -> ReferenceResult:
            """Attend causally."""
            if call.key is None or call.value is None:
                raise TypeError("checked before")
            starts, keys = call.common.query_start_loc, call.common.key_start_loc
            return reference.varlen_attention(
                call.query,
                call.key,
                call.value,
                self.options(call),
                query_start_loc=starts,
                key_start_loc=starts if keys is None else keys,
                causal=True,
            )


class CrossByDecoderLengths(Twin):
    """Takes the decoder's lengths for the encoder's."""

    breaks = ("cross_attention",)

    class impl(ReferenceImpl):
        """See above."""

        def paged_arguments(self, call: ReferenceCall) -> dict[str, Any]:
            """Take the wrong lengths, as far as the table has blocks."""
            arguments = super().paged_arguments(call)
            encoder, own = arguments["seq_lens"], call.common.seq_lens
            return {**arguments, "seq_lens": torch.minimum(encoder, own)}
