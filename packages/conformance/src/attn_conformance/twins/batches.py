"""Twins that are wrong about a batch: its order, its company, its lengths, a shared prefix."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from attn_conformance.reference_backend import (
    ReferenceBuilder,
    ReferenceCall,
    ReferenceImpl,
)
from attn_conformance.twins.by_request import ByRequest, OneRequest
from attn_conformance.twins.twin import Twin
from attn_shared.errors import MetadataError
from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.reference import ReferenceResult

__all__ = ["TWINS"]

_MOST_DRAFTS = 5


class ForgetsItsOrder(Twin):
    """Puts decodes first for its kernels, and leaves the results in that order."""

    breaks = ("order",)

    class impl(ReferenceImpl):
        def attend(self, call: ReferenceCall) -> ReferenceResult:
            result = super().attend(call)
            starts = call.common.query_start_loc.tolist()
            rows = [range(*pair) for pair in pairwise(starts)]
            order = [row for own in sorted(rows, key=len) for row in own]
            output, lse = result.output.clone(), result.lse.clone()
            output[: len(order)], lse[:, : len(order)] = result.output[order], result.lse[:, order]
            return replace(result, output=output, lse=lse)


class DemandsOrder(Twin):
    """Refuses a batch whose decodes do not come first, and does not say so beforehand."""

    breaks = ("order",)

    class builder(ReferenceBuilder):
        def check(self, common_prefix_len: int, common: CommonAttentionMetadata) -> None:
            super().check(common_prefix_len, common)
            lens = common.query_lens_cpu.tolist()
            if lens != sorted(lens):
                raise MetadataError.for_argument("query_start_loc", lens, "decodes first")


class DraftsAsOneToken(Twin):
    """Lets all rows of a short query see what its last row sees, as one decoded token does."""

    breaks = ("drafts", "causal")

    class impl(ByRequest):
        def positions(self, request: OneRequest) -> Tensor:
            if request.query_len > _MOST_DRAFTS:
                return super().positions(request)
            return torch.full((request.query_len,), request.length - 1)


class FirstSixteenRequests(Twin):
    """Serves sixteen requests."""

    breaks = ("many_requests",)

    class impl(ReferenceImpl):
        def attend(self, call: ReferenceCall) -> ReferenceResult:
            result = super().attend(call)
            starts = call.common.query_start_loc
            result.output[int(starts[min(16, len(starts) - 1)]) : result.num_tokens] = 0
            return result


class ThousandKeys(Twin):
    """Leaves out keys past the first 1024, which no small batch has."""

    breaks = ("field_cases",)

    class impl(ByRequest):
        def attend_one(self, call: ReferenceCall, request: OneRequest) -> ReferenceResult:
            slots = self.slots(call, request)[:1024]
            return self.attend_to(call, request, slots, self.positions(request))


class FirstRowsOfPrompts(Twin):
    """Leaves out a request's query tokens past the first 192, which no small batch has."""

    breaks = ("long_prompts",)

    class impl(ByRequest):
        def attend_one(self, call: ReferenceCall, request: OneRequest) -> ReferenceResult:
            result = super().attend_one(call, request)
            result.output[192:] = 0
            return result


class SplitsByCompany(Twin):
    """Rounds another way in a larger batch, since it is split otherwise, and says it does not."""

    breaks = ("batch_invariance",)

    class impl(ReferenceImpl):
        def deliver(
            self,
            call: ReferenceCall,
            result: ReferenceResult,
            output: Tensor | None,
            lse: Tensor | None,
        ) -> Tensor:
            output = super().deliver(call, result, output, lse)
            if call.common.num_reqs > 1:
                output.copy_(output.nextafter(torch.full_like(output, torch.inf)))
            return output


class RowsByPlace(Twin):
    """Rounds a batch's first row another way than the rest."""

    breaks = ("batch_invariance",)

    class impl(ReferenceImpl):
        def deliver(
            self,
            call: ReferenceCall,
            result: ReferenceResult,
            output: Tensor | None,
            lse: Tensor | None,
        ) -> Tensor:
            output = super().deliver(call, result, output, lse)
            output[:1] = output[:1].nextafter(torch.full_like(output[:1], torch.inf))
            return output


class PrefixTwice(Twin):
    """Attends to a shared prefix, and to all keys, and merges the two."""

    breaks = ("cascade",)

    class impl(ByRequest):
        def attend_one(self, call: ReferenceCall, request: OneRequest) -> ReferenceResult:
            length = call.metadata.common_prefix_len
            slots = self.slots(call, request)
            slots = torch.cat([slots[:length], slots])
            return self.attend_to(call, request, slots, self.positions(request) + length)


class SuffixAlone(Twin):
    """Leaves a shared prefix out."""

    breaks = ("cascade",)

    class impl(ByRequest):
        def attend_one(self, call: ReferenceCall, request: OneRequest) -> ReferenceResult:
            length = call.metadata.common_prefix_len
            slots = self.slots(call, request)[length:]
            return self.attend_to(call, request, slots, self.positions(request) - length)


class PrefixOfTheFirst(Twin):
    """Takes the first row's leading blocks for everybody's, whether they are or not."""

    breaks = ("cascade_refused",)

    class builder(ReferenceBuilder):
        def check(self, common_prefix_len: int, common: CommonAttentionMetadata) -> None:
            super().check(0, common)


class BoundsForLengths(Twin):
    """Takes the host's lengths for exact, where they are upper bounds."""

    breaks = ("upper_bounds",)

    class impl(ReferenceImpl):
        def paged_arguments(self, call: ReferenceCall) -> dict[str, Any]:
            arguments = super().paged_arguments(call)
            if call.common.encoder_seq_lens is None and call.common.seq_lens_cpu is not None:
                arguments["seq_lens"] = call.common.seq_lens_cpu
            last = len(self.views(call).key) - 1
            arguments["block_table"] = arguments["block_table"].clamp(0, last)
            return arguments


TWINS: tuple[type[Twin], ...] = (
    ForgetsItsOrder,
    DemandsOrder,
    DraftsAsOneToken,
    FirstSixteenRequests,
    ThousandKeys,
    FirstRowsOfPrompts,
    SplitsByCompany,
    RowsByPlace,
    PrefixTwice,
    SuffixAlone,
    PrefixOfTheFirst,
    BoundsForLengths,
)
