"""Twins that are wrong about the tensors of a call: which they take, write and leave alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attn_conformance.reference_backend import ReferenceCall, ReferenceImpl
from attn_conformance.twins.twin import Twin
from attn_shared.backend import AttentionLayer
from attn_shared.errors import InvalidInputError
from attn_shared.reference import AttentionOptions, ReferenceResult

__all__ = ["TWINS"]


class OutputElsewhere(Twin):
    """Returns a tensor of its own, and leaves the one that it was handed alone."""

    breaks = ("output_in_place",)

    class impl(ReferenceImpl):
        def deliver(
            self,
            call: ReferenceCall,
            result: ReferenceResult,
            output: Tensor | None,
            lse: Tensor | None,
        ) -> Tensor:
            return super().deliver(call, result, None, lse)


class OutputCopied(Twin):
    """Writes the tensor that it was handed, and returns a copy."""

    breaks = ("output_in_place",)

    class impl(ReferenceImpl):
        def deliver(
            self,
            call: ReferenceCall,
            result: ReferenceResult,
            output: Tensor | None,
            lse: Tensor | None,
        ) -> Tensor:
            return super().deliver(call, result, output, lse).clone()


class OutputFlattened(Twin):
    """Returns (T, Hq * Dv) where no output is given."""

    breaks = ("output_none",)

    class impl(ReferenceImpl):
        def deliver(
            self,
            call: ReferenceCall,
            result: ReferenceResult,
            output: Tensor | None,
            lse: Tensor | None,
        ) -> Tensor:
            own = super().deliver(call, result, output, lse)
            return own if output is not None else own.flatten(1)


class OutputWithoutPadding(Twin):
    """Returns the batch's own rows where no output is given, fewer than the query has."""

    breaks = ("output_none",)

    class impl(ReferenceImpl):
        def deliver(
            self,
            call: ReferenceCall,
            result: ReferenceResult,
            output: Tensor | None,
            lse: Tensor | None,
        ) -> Tensor:
            own = super().deliver(call, result, output, lse)
            return own if output is not None else own[: result.num_tokens]


class OutputInFloat64(Twin):
    """Returns float64 where no output is given."""

    breaks = ("output_none",)

    class impl(ReferenceImpl):
        def deliver(
            self,
            call: ReferenceCall,
            result: ReferenceResult,
            output: Tensor | None,
            lse: Tensor | None,
        ) -> Tensor:
            own = super().deliver(call, result, output, lse)
            return own if output is not None else own.to(torch.float64)


class NeedsKeys(Twin):
    """Refuses a call whose key and value are None, though all that it reads is in the cache."""

    breaks = ("cache_alone",)
    raises = True

    class impl(ReferenceImpl):
        def check_call(
            self, call: ReferenceCall, output: Tensor | None, lse: Tensor | None
        ) -> None:
            super().check_call(call, output, lse)
            if call.key is None:
                raise InvalidInputError.for_argument("key", None, "a tensor")


class ForgetsNewKeys(Twin):
    """Without a key, attends to what earlier steps left in the cache only."""

    breaks = ("cache_alone",)

    class impl(ReferenceImpl):
        def paged_arguments(self, call: ReferenceCall) -> dict[str, Any]:
            arguments = super().paged_arguments(call)
            if call.key is None:
                lens = arguments["seq_lens"] - call.common.query_start_loc.diff()
                arguments["seq_lens"] = lens.clamp(min=0)
            return arguments


class DenseQuery(Twin):
    """Reads the query as if its rows lay one after another."""

    breaks = ("strided_inputs",)

    class impl(ReferenceImpl):
        def attend(self, call: ReferenceCall) -> ReferenceResult:
            return super().attend(replace(call, query=_as_dense(call.query)))


class DenseKeys(Twin):
    """Writes keys as if their rows lay one after another."""

    breaks = ("strided_inputs",)

    class impl(ReferenceImpl):
        def do_kv_cache_update(
            self,
            layer: AttentionLayer,
            key: Tensor,
            value: Tensor,
            kv_cache: Tensor,
            slot_mapping: Tensor,
        ) -> None:
            super().do_kv_cache_update(layer, _as_dense(key), value, kv_cache, slot_mapping)


class DenseTable(Twin):
    """Reads the block table as if its rows lay one after another."""

    breaks = ("wide_table",)

    class impl(ReferenceImpl):
        def paged_arguments(self, call: ReferenceCall) -> dict[str, Any]:
            arguments = super().paged_arguments(call)
            table = _as_dense(arguments["block_table"])
            # Where a device would read outside of the cache, this one reads its last block.
            arguments["block_table"] = table.clamp(0, len(self.views(call).key) - 1)
            return arguments


def _as_dense(tensor: Tensor) -> Tensor:
    dense = torch.empty(tensor.shape, device="meta").stride()
    return tensor.as_strided(tensor.shape, dense)


class ScalesQueryInPlace(Twin):
    """Multiplies the caller's query by the scale."""

    breaks = ("inputs_unchanged",)

    class impl(ReferenceImpl):
        def attend(self, call: ReferenceCall) -> ReferenceResult:
            call.query.mul_(self.spec.scale)
            return super().attend(call)

        def options(self, call: ReferenceCall) -> AttentionOptions:
            return replace(super().options(call), scale=1.0)


class ClampsLengthsInPlace(Twin):
    """Overwrites the batch's lengths while it attends."""

    breaks = ("inputs_unchanged", "metadata_reused")

    class impl(ReferenceImpl):
        def attend(self, call: ReferenceCall) -> ReferenceResult:
            result = super().attend(call)
            call.common.seq_lens.clamp_(max=4)
            return result


class ZeroesTails(Twin):
    """Clears the slots past each sequence's end, so that nothing leaks from them."""

    breaks = ("cache_unchanged",)

    class impl(ReferenceImpl):
        def attend(self, call: ReferenceCall) -> ReferenceResult:
            table = call.common.block_table
            if table is not None and call.kv_cache is not None:
                size = self.views(call).key.shape[1]
                for row, length in zip(table, call.common.seq_lens.tolist(), strict=True):
                    if length % size:
                        for view in self.views(call)[:2]:
                            block = view[int(row[length // size]), length % size :]
                            block.view(torch.uint8).zero_()
            return super().attend(call)


TWINS: tuple[type[Twin], ...] = (
    OutputElsewhere,
    OutputCopied,
    OutputFlattened,
    OutputWithoutPadding,
    OutputInFloat64,
    NeedsKeys,
    ForgetsNewKeys,
    DenseQuery,
    DenseKeys,
    DenseTable,
    ScalesQueryInPlace,
    ClampsLengthsInPlace,
    ZeroesTails,
)
