"""Twins that are wrong about who sees whom."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attn_conformance.reference_backend import ReferenceCall, ReferenceImpl
from attn_conformance.twins.by_request import ByRequest, OneRequest
from attn_conformance.twins.twin import Twin
from attn_shared import reference
from attn_shared.reference import AttentionOptions, ReferenceResult
from attn_shared.request import AttentionType

__all__ = ["TWINS"]


class CausalTopLeft(Twin):
    """Aligns the causal mask with the first key, as torch's is_causal does."""

    breaks = ("extend", "generated")

    class impl(ByRequest):
        def positions(self, request: OneRequest) -> Tensor:
            return torch.arange(request.query_len)


class StrictlyCausal(Twin):
    """A row does not see its own key."""

    breaks = ("causal", "extend")

    class impl(ByRequest):
        def positions(self, request: OneRequest) -> Tensor:
            return super().positions(request) - 1


class OneKeyAhead(Twin):
    """A row sees the key after its own."""

    breaks = ("causal", "extend")

    class impl(ByRequest):
        def positions(self, request: OneRequest) -> Tensor:
            return super().positions(request) + 1


class AlwaysCausal(Twin):
    """Ignores that rows are not causal."""

    breaks = ("non_causal",)

    class impl(ReferenceImpl):
        def paged_arguments(self, call: ReferenceCall) -> dict[str, Any]:
            return {**super().paged_arguments(call), "causal": True}


class CausalFirstOnly(Twin):
    """Takes the first request's causality for all."""

    breaks = ("per_request_causality",)

    class impl(ReferenceImpl):
        def paged_arguments(self, call: ReferenceCall) -> dict[str, Any]:
            arguments = super().paged_arguments(call)
            causal = arguments["causal"]
            if isinstance(causal, Tensor):
                arguments["causal"] = bool(causal[0])
            return arguments


class _OtherWindow(ReferenceImpl):
    """Moves the left side of a window, and the right side where it hides anything."""

    shift = 0

    def options(self, call: ReferenceCall) -> AttentionOptions:
        options = super().options(call)
        left, right = (
            None if side is None else max(0, side + self.shift) for side in options.window
        )
        if options.window[1] == 0:
            right = 0
        return replace(options, window=(left, right))


class WindowOneWide(Twin):
    """Keeps one key more than the window has."""

    breaks = ("window", "two_sided_window")

    class impl(_OtherWindow):
        shift = 1


class WindowOneShort(Twin):
    """Takes the keys to the left for the number of keys in all, the query's own included."""

    breaks = ("window", "two_sided_window", "combinations")

    class impl(_OtherWindow):
        shift = -1


class WindowOpenAtZero(Twin):
    """Takes a window of 0 for none, as calls do that write "off" as 0."""

    breaks = ("window", "two_sided_window")

    class impl(ReferenceImpl):
        def options(self, call: ReferenceCall) -> AttentionOptions:
            options = super().options(call)
            left, right = options.window
            return replace(options, window=(left or None, right or None))


class WindowByBlocks(Twin):
    """Lets a window begin up to a block early, where its kernel's first tile does."""

    breaks = ("window", "freed_blocks")

    class impl(ReferenceImpl):
        def options(self, call: ReferenceCall) -> AttentionOptions:
            options, cache = super().options(call), self.spec.kv_cache_spec
            left, right = options.window
            if left is None or cache is None:
                return options
            return replace(options, window=(left + cache.block_size - 1, right))


class OneSidedWindow(Twin):
    """Drops the right side of a window."""

    breaks = ("two_sided_window",)

    class impl(ReferenceImpl):
        def options(self, call: ReferenceCall) -> AttentionOptions:
            options = super().options(call)
            return replace(options, window=(options.window[0], None))


class DroppedRanges(Twin):
    """Ignores multimodal ranges."""

    breaks = ("multimodal_ranges",)

    class impl(ReferenceImpl):
        def paged_arguments(self, call: ReferenceCall) -> dict[str, Any]:
            return {**super().paged_arguments(call), "mm_prefix_ranges": {}}


class HalfOpenRanges(Twin):
    """Leaves the last position out of a multimodal range."""

    breaks = ("multimodal_ranges",)

    class impl(ReferenceImpl):
        def paged_arguments(self, call: ReferenceCall) -> dict[str, Any]:
            arguments = super().paged_arguments(call)
            arguments["mm_prefix_ranges"] = {
                request: [(start, end - 1) for start, end in ranges if start < end]
                for request, ranges in arguments["mm_prefix_ranges"].items()
            }
            return arguments


class DroppedChunks(Twin):
    """Ignores chunks."""

    breaks = ("chunked_local",)

    class impl(ReferenceImpl):
        def options(self, call: ReferenceCall) -> AttentionOptions:
            return replace(super().options(call), chunk_size=None)


class ChunksAsWindow(Twin):
    """Takes a chunk for a window of as many keys."""

    breaks = ("chunked_local",)

    class impl(ReferenceImpl):
        def options(self, call: ReferenceCall) -> AttentionOptions:
            options = super().options(call)
            if options.chunk_size is None:
                return options
            return replace(options, chunk_size=None, window=(options.chunk_size - 1, 0))


class CausalEncoder(Twin):
    """Masks an encoder as if it were a decoder."""

    breaks = ("encoder", "encoder_only")

    class impl(ReferenceImpl):
        def attend_ragged(self, call: ReferenceCall) -> ReferenceResult:
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


class EncoderAsOne(Twin):
    """Lets all requests of an encoder see each other."""

    breaks = ("encoder", "encoder_only")

    class impl(ReferenceImpl):
        def attend_ragged(self, call: ReferenceCall) -> ReferenceResult:
            if call.key is None or call.value is None:
                raise TypeError("checked before")
            count = call.common.num_actual_tokens
            loc = call.common.key_start_loc
            keys = count if loc is None else int(loc[-1])
            result = reference.attention(
                call.query[:count],
                call.key[:keys],
                call.value[:keys],
                self.options(call),
                causal=False,
            )
            return replace(result, num_tokens=count)


class CrossByDecoderLengths(Twin):
    """Takes the decoder's lengths for the encoder's, as far as the table has blocks."""

    breaks = ("cross_attention",)

    class impl(ReferenceImpl):
        def paged_arguments(self, call: ReferenceCall) -> dict[str, Any]:
            arguments = super().paged_arguments(call)
            own = torch.minimum(arguments["seq_lens"], call.common.seq_lens)
            return {**arguments, "seq_lens": own}


class CausalCross(Twin):
    """Masks cross-attention as if its keys were the decoder's."""

    breaks = ("cross_attention",)

    class impl(ReferenceImpl):
        def paged_arguments(self, call: ReferenceCall) -> dict[str, Any]:
            arguments = super().paged_arguments(call)
            if self.spec.attn_type is AttentionType.ENCODER_DECODER:
                arguments["causal"] = True
            return arguments


TWINS: tuple[type[Twin], ...] = (
    CausalTopLeft,
    StrictlyCausal,
    OneKeyAhead,
    AlwaysCausal,
    CausalFirstOnly,
    WindowOneWide,
    WindowOneShort,
    WindowOpenAtZero,
    WindowByBlocks,
    OneSidedWindow,
    DroppedRanges,
    HalfOpenRanges,
    DroppedChunks,
    ChunksAsWindow,
    CausalEncoder,
    EncoderAsOne,
    CrossByDecoderLengths,
    CausalCross,
)
