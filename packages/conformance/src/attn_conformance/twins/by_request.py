"""Attention request by request, in steps of which a twin gets one wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_conformance.reference_backend import ReferenceCall, ReferenceImpl
from attn_conformance.twins.twin import Twin
from attn_shared import reference
from attn_shared.reference import ReferenceResult

__all__ = ["ByRequest", "OneRequest", "Unbroken"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OneRequest:
    """One request of a call.

    Attributes:
        index: its place in the batch.
        rows: its query rows.
        length: its keys.
        row: its row of the block table, garbage included.
        block_size: tokens per block.
        is_causal: its rule.
        ranges: its multimodal ranges.
    """

    index: int
    rows: slice
    length: int
    row: Tensor
    block_size: int
    is_causal: bool
    ranges: Sequence[tuple[int, int]]

    @property
    def query_len(self) -> int:
        """Its query rows, counted."""
        return int(self.rows.stop - self.rows.start)

    @property
    def blocks(self) -> Tensor:
        """Its blocks in order, int64, without the row's garbage."""
        return self.row[: -(-self.length // self.block_size)].long()


class ByRequest(ReferenceImpl):
    """Reads a cache as `ReferenceImpl` does, one request after another."""

    def attend_paged(self, call: ReferenceCall) -> ReferenceResult:
        """Put the requests' results together."""
        rows, heads = call.query.shape[:2]
        nan = torch.nan
        output = torch.full((rows, heads, self.spec.head_size_v), nan, dtype=torch.float64)
        lse = torch.full((heads, rows), nan, dtype=torch.float64)
        for request in self.requests(call):
            result = self.attend_one(call, request)
            output[request.rows], lse[:, request.rows] = result.output, result.lse
        count = call.common.num_actual_tokens
        return ReferenceResult(output=output, lse=lse, num_tokens=count, value_abs_max=0.0)

    def requests(self, call: ReferenceCall) -> Iterator[OneRequest]:
        """Yield what `paged_arguments` describes."""
        arguments: dict[str, Any] = self.paged_arguments(call)
        starts = arguments["query_start_loc"].tolist()
        causal = arguments["causal"]
        for index, length in enumerate(arguments["seq_lens"].tolist()):
            yield OneRequest(
                index=index,
                rows=slice(starts[index], starts[index + 1]),
                length=length,
                row=arguments["block_table"][index],
                block_size=self.views(call).key.shape[1],
                is_causal=bool(causal[index] if isinstance(causal, Tensor) else causal),
                ranges=arguments["mm_prefix_ranges"].get(index, ()),
            )

    def attend_one(self, call: ReferenceCall, request: OneRequest) -> ReferenceResult:
        """Attend for the rows of one request."""
        return self.attend_to(call, request, self.slots(call, request), self.positions(request))

    def attend_to(
        self, call: ReferenceCall, request: OneRequest, slots: Tensor, positions: Tensor
    ) -> ReferenceResult:
        """Attend to the keys in some slots, with the rows at some positions among them."""
        key, value = self.read(call, slots)
        return reference.attention(
            call.query[request.rows],
            key,
            value,
            self.options(call),
            causal=request.is_causal,
            query_positions=positions,
            mm_prefix_ranges=request.ranges,
        )

    def positions(self, request: OneRequest) -> Tensor:
        """Return the absolute position of each query row: int64 (query_len,)."""
        return torch.arange(request.length - request.query_len, request.length)

    def slots(self, call: ReferenceCall, request: OneRequest) -> Tensor:
        """Return where its keys lie: int64 (length,)."""
        index = torch.arange(request.length)
        size = request.block_size
        return request.blocks[index // size] * size + index % size

    def read(self, call: ReferenceCall, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys (n, Hkv, D) and values (n, Hkv, Dv) of some slots, dequantised."""
        arguments, views = self.paged_arguments(call), self.views(call)
        place = (slots // views.key.shape[1], slots % views.key.shape[1])
        key = _dequantised(views.key[place], arguments["k_scale"], arguments["key_scales"], place)
        value = _dequantised(
            views.value[place], arguments["v_scale"], arguments["value_scales"], place
        )
        return key, value


def _dequantised(
    stored: Tensor, scale: float | Tensor, scales: Tensor | None, place: tuple[Tensor, Tensor]
) -> Tensor:
    if scales is not None:
        return stored.double() * scales[place].double().unsqueeze(-1)
    per_head = torch.as_tensor(scale, dtype=torch.float32).double()
    return stored.double() * per_head.reshape(-1, 1)


class Unbroken(Twin):
    """Nothing is wrong with it: a twin that it is made of is broken by its own fault alone."""

    impl = ByRequest
