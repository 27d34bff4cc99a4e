"""Twins that read what nobody may read, or are wrong about rows that see nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attn_conformance.reference_backend import (
    ReferenceBuilder,
    ReferenceCall,
    ReferenceImpl,
    ReferenceMetadata,
)
from attn_conformance.twins.by_request import ByRequest, OneRequest
from attn_conformance.twins.twin import Twin
from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.reference import ReferenceResult

__all__ = ["TWINS"]


class _Tile(ByRequest):
    """Multiplies values past a sequence's end by 0, which does away with all but NaN."""

    def extra(self, call: ReferenceCall, request: OneRequest) -> Tensor:
        """Return slots that are loaded beside the request's own."""
        raise NotImplementedError

    def attend_one(self, call: ReferenceCall, request: OneRequest) -> ReferenceResult:
        result = super().attend_one(call, request)
        _, value = self.read(call, self.extra(call, request))
        value = value.repeat_interleave(self.spec.queries_per_kv, dim=1)
        return replace(result, output=result.output + (0 * value).sum(0))


class LoadsNextBlock(Twin):
    """Loads the block after a row's last, whatever its id is, and weighs it with 0."""

    breaks = ("unread_blocks",)

    class impl(_Tile):
        def extra(self, call: ReferenceCall, request: OneRequest) -> Tensor:
            count, last = len(request.blocks), len(self.views(call).key) - 1
            block = request.row[count : count + 1].long().clamp(0, last)
            return block * request.block_size


class LoadsWholeBlock(Twin):
    """Loads the last block to its end, and weighs what is past the sequence with 0."""

    breaks = ("nan_tails",)

    class impl(_Tile):
        def extra(self, call: ReferenceCall, request: OneRequest) -> Tensor:
            size = request.block_size
            index = torch.arange(request.length, len(request.blocks) * size)
            return request.blocks[index // size] * size + index % size


class SeesOneSlotMore(Twin):
    """Lets every row see the slot past the sequence's end, where a block has one."""

    breaks = ("finite_tails", "unread_blocks", "nan_tails")

    class impl(ByRequest):
        def attend_one(self, call: ReferenceCall, request: OneRequest) -> ReferenceResult:
            positions = self.positions(request)
            if request.length % request.block_size:
                request = replace(request, length=request.length + 1)
                positions = positions + 1
            return self.attend_to(call, request, self.slots(call, request), positions)


class SoftMask(Twin):
    """Adds -10000 to a masked logit: what is large enough shows all the same."""

    breaks = ("finite_tails", "nan_tails")

    class impl(ByRequest):
        def attend_one(self, call: ReferenceCall, request: OneRequest) -> ReferenceResult:
            result = super().attend_one(call, request)
            size = request.block_size
            index = torch.arange(request.length, len(request.blocks) * size)
            key, _ = self.read(call, request.blocks[index // size] * size + index % size)
            key = key.repeat_interleave(self.spec.queries_per_kv, dim=1)
            logits = torch.einsum("qhd,khd->hqk", call.query[request.rows].double(), key)
            is_small = logits * self.spec.scale - 10000 <= result.lse[..., None]  # no NaN is
            result.output[~is_small.all(-1).T] = torch.nan
            return result


class ScalesByLargestQuery(Twin):
    """Divides the query by its largest element and multiplies again, padding rows included."""

    breaks = ("unread_query_rows",)

    class impl(ReferenceImpl):
        def attend(self, call: ReferenceCall) -> ReferenceResult:
            peak = call.query.abs().amax() if len(call.query) else call.query.new_ones(())
            return super().attend(replace(call, query=call.query + 0 * peak))


class _KeylessRows(ReferenceImpl):
    """Gives rows that see no key something else."""

    def spoil(self, result: ReferenceResult, is_keyless: Tensor) -> ReferenceResult:
        raise NotImplementedError

    def attend(self, call: ReferenceCall) -> ReferenceResult:
        result = super().attend(call)
        return self.spoil(result, (result.output == 0).all(-1))


class DividesByZero(Twin):
    """Divides 0 by 0 for a row that sees no key."""

    breaks = ("padded_requests", "keyless_rows")

    class impl(_KeylessRows):
        def spoil(self, result: ReferenceResult, is_keyless: Tensor) -> ReferenceResult:
            result.output[is_keyless] = torch.nan
            return result


class MeanOfNothing(Twin):
    """Gives a row that sees no key the mean of values, since all its logits are equal."""

    breaks = ("padded_requests", "keyless_rows")

    class impl(_KeylessRows):
        def spoil(self, result: ReferenceResult, is_keyless: Tensor) -> ReferenceResult:
            result.output[is_keyless] = 1.0
            return result


class PlusInfinity(Twin):
    """Returns an LSE of +inf for a row that sees no key, as one kernel of the field does."""

    breaks = ("padded_requests", "keyless_rows")

    class impl(_KeylessRows):
        def spoil(self, result: ReferenceResult, is_keyless: Tensor) -> ReferenceResult:
            return replace(result, lse=result.lse.masked_fill(is_keyless.T, torch.inf))


class NoSinkWithoutKeys(Twin):
    """Returns -inf for a row that sees no key, though a sink is in the denominator."""

    breaks = ("padded_requests", "keyless_rows")

    class impl(_KeylessRows):
        def spoil(self, result: ReferenceResult, is_keyless: Tensor) -> ReferenceResult:
            return replace(result, lse=result.lse.masked_fill(is_keyless.T, -torch.inf))


class LeavesPaddingAlone(Twin):
    """Leaves the output of padded requests as it finds it."""

    breaks = ("padded_requests",)

    class impl(ReferenceImpl):
        def attend(self, call: ReferenceCall) -> ReferenceResult:
            result = super().attend(call)
            count = int(call.common.query_start_loc[(call.common.seq_lens > 0).sum()])
            return replace(result, num_tokens=min(count, result.num_tokens))


class CompactsQueries(Twin):
    """Leaves requests without query rows out of the lengths, and not out of the table."""

    breaks = ("queryless_requests",)

    class impl(ReferenceImpl):
        def paged_arguments(self, call: ReferenceCall) -> dict[str, Any]:
            arguments = super().paged_arguments(call)
            starts, last = call.common.query_start_loc, len(self.views(call).key) - 1
            has_rows = starts.diff() > 0
            order = torch.cat([has_rows.nonzero(), (~has_rows).nonzero()]).flatten()
            table = arguments["block_table"].clamp(0, last)
            lens = arguments["seq_lens"][order].clamp(max=table.shape[1] * self._block_size)
            query_lens = starts.diff()[order]
            moved = torch.cat([starts[:1], query_lens.cumsum(0, dtype=starts.dtype)])
            return {
                **arguments,
                "query_start_loc": moved,
                "seq_lens": lens,
                "block_table": table,
            }

        @property
        def _block_size(self) -> int:
            return 1 if self.spec.kv_cache_spec is None else self.spec.kv_cache_spec.block_size


class MaximumOfNothing(Twin):
    """Takes the longest of no sequences."""

    breaks = ("empty_batch",)
    raises = True

    class builder(ReferenceBuilder):
        def build(
            self, common_prefix_len: int, common: CommonAttentionMetadata, fast_build: bool = False
        ) -> ReferenceMetadata:
            int(common.seq_lens.max())
            return super().build(common_prefix_len, common, fast_build)


TWINS: tuple[type[Twin], ...] = (
    LoadsNextBlock,
    LoadsWholeBlock,
    SeesOneSlotMore,
    SoftMask,
    ScalesByLargestQuery,
    DividesByZero,
    MeanOfNothing,
    PlusInfinity,
    NoSinkWithoutKeys,
    LeavesPaddingAlone,
    CompactsQueries,
    MaximumOfNothing,
)
