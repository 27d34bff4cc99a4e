"""Right answers first: a contender's output is held to the float64 reference before it is timed.

A few rows are enough to tell a wrong kernel, a window that is off, or a block table misread; what
a backend owes in full is attn-conformance's affair. Beside the contract's budget, which bounds the
largest error, the sample's error as a whole is bounded: over thousands of random keys outputs are
small, and an answer of zeros would be within the budget of bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attn_bench.contenders import Copy
from attn_shared.accuracy import check_against_reference, eager_attention
from attn_shared.errors import AttnError
from attn_shared.kv_cache import KVViews
from attn_shared.quantization import FP8_DTYPES
from attn_shared.reference import AttentionOptions, ReferenceResult, paged_attention

__all__ = ["WrongResultError", "check_agreement"]

_MANY_ELEMENTS = 2**22  # keys of this many elements are attended to on the device
_ROWS = 4  # of each end of a request's query
_ERROR_RATIO = 2.0  # of the contract: so much more than eager attention may a kernel err


class WrongResultError(AttnError):
    """A contender's output is not attention of its inputs; such a thing is not timed."""

    exit_code = 1


def check_agreement(name: str, copy: Copy, result: Any) -> None:
    """Compare the first and last rows of the shortest and the longest request with the reference.

    Args:
        name: of the contender.
        copy: its inputs.
        result: what a call on them returned.

    Raises:
        WrongResultError: it is off by more than reduced precision explains; says by how much.
    """
    query, output = copy.query(), copy.tokens(result)
    lse = None if copy.lse is None else copy.lse(result)
    wanted = (*query.shape[:2], copy.keys(0).value.shape[-1])
    if output.shape != wanted:
        raise WrongResultError(
            f"{name} returned a shape of {tuple(output.shape)}, not {tuple(wanted)}."
        )
    if lse is not None and lse.shape != (query.shape[1], query.shape[0]):
        raise WrongResultError(f"{name} returned an LSE of {tuple(lse.shape)}, not (Hq, T).")
    exact, eager, got, got_lse = [], [], [], []
    for request, rows, seq_len in _samples(copy.lengths):
        sample = _Sample.of(copy, query[rows], request, seq_len)
        exact.append(sample.exact())
        eager.append(sample.eager())
        got.append(output[rows].cpu())
        got_lse += [] if lse is None else [lse[:, rows].cpu()]
    dtype = copy.compute_dtype or query.dtype
    problem = _problem(
        torch.cat(got),
        torch.cat(got_lse, dim=1) if got_lse else None,
        _joined(exact),
        _joined(eager),
        dtype,
        copy.error_factor,
    )
    if problem:
        raise WrongResultError(
            f"{name} is not timed: its result is wrong ({problem}).",
            hint=f"`attn verify {name}` runs the whole conformance suite on a backend.",
        )


def _samples(lengths: tuple[tuple[int, int], ...]) -> Iterator[tuple[int, slice, int]]:
    """Yield (request, rows of the query, keys that the last of these rows sees)."""
    starts = [0]
    for query_len, _ in lengths:
        starts.append(starts[-1] + query_len)
    by_length = sorted(range(len(lengths)), key=lambda request: lengths[request][1])
    for request in dict.fromkeys((by_length[0], by_length[-1])):
        query_len, seq_len = lengths[request]
        ends = {(0, min(_ROWS, query_len)), (max(0, query_len - _ROWS), query_len)}
        for first, stop in sorted(ends):
            rows = slice(starts[request] + first, starts[request] + stop)
            yield request, rows, seq_len - query_len + stop


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Sample:
    """Rows (n, Hq, D) that end at the last of some keys, which lie in one block."""

    query: Tensor
    keys: KVViews
    window: tuple[int | None, int | None]
    scale: float
    compute_dtype: torch.dtype

    @classmethod
    def of(cls, copy: Copy, query: Tensor, request: int, seq_len: int) -> _Sample:
        """Take rows of a request; a long one stays on its device, which is faster there."""
        views = copy.keys(request)
        is_long = seq_len * views.key.shape[1] * views.key.shape[2] > _MANY_ELEMENTS
        device = query.device if is_long else torch.device("cpu")
        block = (None if view is None else view[:seq_len].unsqueeze(0).to(device) for view in views)
        key, value, key_scale, value_scale = block
        if key is None or value is None:
            raise TypeError("a request has keys and values")
        dtype = copy.compute_dtype or query.dtype
        if dtype in FP8_DTYPES:
            query = query.to(dtype).to(query.dtype)  # what the kernel was given
        return cls(
            query=query.to(device),
            keys=KVViews(key, value, key_scale, value_scale),
            window=copy.window,
            scale=query.shape[-1] ** -0.5 if copy.scale is None else copy.scale,
            compute_dtype=dtype,
        )

    def exact(self) -> ReferenceResult:
        """Attend in float64."""
        return _on_host(paged_attention(**self._call()))

    def eager(self) -> ReferenceResult:
        """Attend as the yardstick of the contract does."""
        return _on_host(eager_attention(**self._call(), compute_dtype=self.compute_dtype))

    def _call(self) -> dict[str, Any]:
        rows, device = len(self.query), self.query.device
        return {
            "query": self.query,
            "key_cache": self.keys.key,
            "value_cache": self.keys.value,
            "options": AttentionOptions(scale=self.scale, window=self.window),
            "query_start_loc": torch.tensor([0, rows], dtype=torch.int32, device=device),
            "seq_lens": torch.tensor([self.keys.key.shape[1]], dtype=torch.int32, device=device),
            "block_table": torch.zeros(1, 1, dtype=torch.int32, device=device),
            "key_scales": self.keys.key_scale,
            "value_scales": self.keys.value_scale,
        }


def _on_host(result: ReferenceResult) -> ReferenceResult:
    return replace(result, output=result.output.cpu(), lse=result.lse.cpu())


def _joined(results: list[ReferenceResult]) -> ReferenceResult:
    return ReferenceResult(
        output=torch.cat([result.output for result in results]),
        lse=torch.cat([result.lse for result in results], dim=1),
        num_tokens=sum(result.num_tokens for result in results),
        value_abs_max=max(result.value_abs_max for result in results),
    )


def _problem(
    got: Tensor,
    lse: Tensor | None,
    exact: ReferenceResult,
    eager: ReferenceResult,
    dtype: torch.dtype,
    factor: float,
) -> str:
    """Say what is wrong, or nothing; beyond a factor of 1 the sample as a whole alone counts."""
    report = check_against_reference(got, lse, exact, eager, dtype=dtype)
    if not report.ok and factor <= 1:
        return str(report)
    budget = _ERROR_RATIO * _relative(eager.output, exact.output) + torch.finfo(dtype).eps
    allowed = factor * budget
    error = _relative(got, exact.output)
    return "" if error <= allowed else f"relative error {error:.2e} is over {allowed:.2e}"


def _relative(got: Tensor, exact: Tensor) -> float:
    """Return |got - exact| / |exact|, Euclidean norms over all elements."""
    return float((got.double() - exact).norm() / exact.norm())
