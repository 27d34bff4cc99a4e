"""Right answers first: a contender's output is held to the float64 reference before it is timed.

A few rows are enough to tell a wrong kernel, a window that is off, or a block table misread; what
a backend owes in full is attn-conformance's affair. Beside the contract's budget, which bounds the
largest error, the sample's error as a whole is bounded: over thousands of random keys outputs are
small, and an answer of zeros would be within the budget of bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from attn_bench.contenders import Copy
from attn_shared.accuracy import check_against_reference, eager_attention
from attn_shared.errors import AttnError
from attn_shared.kv_cache import KVViews
from attn_shared.reference import AttentionOptions, ReferenceResult, paged_attention

__all__ = ["WrongResultError", "check_agreement"]

_ROWS = 4  # of each end of a request's query
_ERROR_RATIO = 2.0  # of the contract: so much more than eager attention may a kernel err


class WrongResultError(AttnError):
    """A contender's output is not attention of its inputs; such a thing is not timed."""

    exit_code = 1


def check_agreement(name: str, copy: Copy, output: Tensor) -> None:
    """Compare the first and last rows of the shortest and the longest request with the reference.

    Args:
        name: of the contender.
        copy: its inputs.
        output: (T, Hq, D) of a call on them.

    Raises:
        WrongResultError: it is off by more than reduced precision explains; says by how much.
    """
    query = copy.query()
    if output.shape != query.shape:
        raise WrongResultError(
            f"{name} returned a shape of {tuple(output.shape)}, not {tuple(query.shape)}."
        )
    exact, eager, got = [], [], []
    for request, rows, seq_len in _samples(copy.lengths):
        keys = copy.keys(request)
        exact.append(_answer(query[rows], keys, seq_len, is_exact=True))
        eager.append(_answer(query[rows], keys, seq_len, is_exact=False))
        got.append(output[rows].cpu())
    problem = _problem(torch.cat(got), _joined(exact), _joined(eager), query.dtype)
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


def _answer(query: Tensor, keys: KVViews, seq_len: int, *, is_exact: bool) -> ReferenceResult:
    """Attend with rows (n, Hq, D) that end at `seq_len`, over keys that lie in one block."""
    key, value, key_scale, value_scale = (
        None if view is None else view[:seq_len].unsqueeze(0).cpu() for view in keys
    )
    if key is None or value is None:
        raise TypeError("a request has keys and values")
    attend = paged_attention if is_exact else eager_attention
    return attend(
        query.cpu(),
        key,
        value,
        AttentionOptions(scale=query.shape[-1] ** -0.5),
        query_start_loc=torch.tensor([0, len(query)], dtype=torch.int32),
        seq_lens=torch.tensor([seq_len], dtype=torch.int32),
        block_table=torch.zeros(1, 1, dtype=torch.int32),
        key_scales=key_scale,
        value_scales=value_scale,
    )


def _joined(results: list[ReferenceResult]) -> ReferenceResult:
    return ReferenceResult(
        output=torch.cat([result.output for result in results]),
        lse=torch.cat([result.lse for result in results], dim=1),
        num_tokens=sum(result.num_tokens for result in results),
        value_abs_max=max(result.value_abs_max for result in results),
    )


def _problem(
    got: Tensor, exact: ReferenceResult, eager: ReferenceResult, dtype: torch.dtype
) -> str:
    """Say what is wrong, or nothing."""
    report = check_against_reference(got, None, exact, eager, dtype=dtype)
    if not report.ok:
        return str(report)
    allowed = _ERROR_RATIO * _relative(eager.output, exact.output) + torch.finfo(dtype).eps
    error = _relative(got, exact.output)
    return "" if error <= allowed else f"relative error {error:.2e} is over {allowed:.2e}"


def _relative(got: Tensor, exact: Tensor) -> float:
    """Return |got - exact| / |exact|, Euclidean norms over all elements."""
    return float((got.double() - exact).norm() / exact.norm())
