"""The parts of a step: rows that one planned call of FlashInfer serves.

Each writes its rows of output and LSE. The kernels' LSE is (T, Hq) of base 2; the contract's is
(Hq, T) and natural.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from attn_cuda._fi_key import Call
from attn_cuda._fi_wrappers import Lease
from attn_shared.alignment import aligned

__all__ = ["CascadePart", "FreshPart", "Once", "Part", "PlannedPart", "deliver_lse"]

_LN2 = math.log(2.0)


class Part(Protocol):
    """Rows of a step."""

    def run(self, call: Call) -> None:
        """Write the rows of `call.output` and, where it is given, of `call.lse`."""


def deliver_lse(target: Tensor, first: int, last: int, bits: Tensor) -> None:
    """Write an LSE (rows, Hq) of base 2 into columns of one (Hq, T) of base e."""
    torch.mul(bits.T, _LN2, out=target[:, first:last])


class Once:
    """Makes a part when it is first asked for; a layer that never asks costs nothing."""

    __slots__ = ("_made", "_make")

    def __init__(self, make: Callable[[], PlannedPart]) -> None:
        self._make = make
        self._made: PlannedPart | None = None

    def __call__(self) -> PlannedPart:
        """Return the part."""
        if self._made is None:
            self._made = self._make()
        return self._made


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlannedPart:
    """Rows over pages.

    Attributes:
        lease: the wrapper, planned.
        first, last: rows of the step, the last excluded.
        keyless: (n,) int64: rows among them that see no key, which some kernels leave unwritten,
            and whose LSE they write as a finite number; None where there are none.
        with_lse: makes the part of the same rows whose kernels have the LSE; None: these have it.
    """

    lease: Lease
    first: int
    last: int
    keyless: Tensor | None = None
    with_lse: Callable[[], PlannedPart] | None = None

    def run(self, call: Call) -> None:
        """Run the wrapper."""
        if call.lse is not None and self.with_lse is not None:
            self.with_lse().run(call)
            return
        first, last, scaling = self.first, self.last, call.scaling
        query, output = call.query, call.output
        if first or last != call.num_rows:
            query, output = query[first:last], output[first:last]
        if scaling.lift != 1.0:
            query = query * scaling.lift
        options: Mapping[str, Any] = scaling.options
        if call.lse is not None:
            options = {**options, **self.lease.planner.run_options, "return_lse": True}
        found = self.lease.run(q=query, paged_kv_cache=call.cache, out=output, **options)
        if call.lse is not None:
            deliver_lse(call.lse, first, last, found[1])
        if self.keyless is not None:
            output.index_fill_(0, self.keyless, 0.0)
            if call.lse is not None:
                call.lse[:, first:last].index_fill_(1, self.keyless, -math.inf)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FreshPart:
    """Rows whose keys are all new, read as they come with the call and not from pages.

    Attributes:
        lease: the ragged wrapper, planned.
        first, last: rows of the step, the last excluded.
        paged: makes the part over pages, for a layer whose call brings no keys, or whose logits'
            factor must be lifted, which the ragged wrapper takes no number for.
    """

    lease: Lease
    first: int
    last: int
    paged: Callable[[], PlannedPart]

    def run(self, call: Call) -> None:
        """Run the wrapper."""
        if call.fresh is None or call.scaling.lift != 1.0:
            self.paged().run(call)
            return
        first, last = self.first, self.last
        key, value = call.fresh
        options: dict[str, Any] = {}
        if call.lse is not None:
            options = {**self.lease.planner.run_options, "return_lse": True}
        found = self.lease.run(
            q=call.query[first:last],
            k=aligned(key[first:last]),
            v=aligned(value[first:last]),
            out=call.output[first:last],
            **options,
        )
        if call.lse is not None:
            deliver_lse(call.lse, first, last, found[1])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CascadePart:
    """All rows over a shared prefix, and each over what follows it.

    Attributes:
        lease: the wrapper of two levels, planned; None for kernels that have none.
        num_tokens: rows.
        apart: makes the two levels as parts of their own, where the LSE (True) or scales are asked
            for, which the wrapper of two levels does not give.
        merge: as `attn_shared.merge.merge_attn_states`.
    """

    lease: Lease | None
    num_tokens: int
    apart: Callable[[bool], tuple[Part, Part]]
    merge: Callable[..., tuple[Tensor, Tensor]]

    def run(self, call: Call) -> None:
        """Run the levels and merge them."""
        output = call.output[: self.num_tokens]
        scaling = call.scaling
        is_plain = call.lse is None and scaling.k_scale == scaling.v_scale == scaling.lift == 1.0
        if self.lease is not None and is_plain:
            query = call.query[: self.num_tokens]
            output.copy_(self.lease.run(q=query, paged_kv_cache=call.cache))
            return
        prefix, suffix = self.apart(call.lse is not None)
        first = self._side(prefix, call, output, None)  # sinks are counted once, in the other
        merged, lse = self.merge(*first, *self._side(suffix, call, output, call.sinks))
        output.copy_(merged)
        if call.lse is not None:
            call.lse[:, : self.num_tokens].copy_(lse)

    def _side(
        self, part: Part, call: Call, like: Tensor, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        output = torch.empty_like(like)
        lse = output.new_empty((output.shape[1], output.shape[0]), dtype=torch.float32)
        part.run(replace(call, output=output, lse=lse, fresh=None, sinks=sinks))
        return output, lse
