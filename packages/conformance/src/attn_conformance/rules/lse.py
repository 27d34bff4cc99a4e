"""The logarithm of the softmax's denominator, and results merged by it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from attn_conformance.batch import Batch
from attn_conformance.case import Case
from attn_conformance.checks import Answer, answer_of
from attn_conformance.engine import Result
from attn_conformance.fit import Fit
from attn_conformance.rule import Depth, Rule
from attn_conformance.rules._shapes import over_shapes
from attn_conformance.subject import Subject
from attn_shared.capability import Reason
from attn_shared.merge import merge_attn_states
from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.request import AttentionType

__all__ = ["RULES"]

_FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"scale": 0.7},
    "sinks": {"has_sinks": True},
    "softcap": {"softcap": 1.5},
    "alibi": {"has_alibi": True},
    "window": {"window": (3, 0)},
    "non-causal": {"causal": False},
    "fp8": {"kv_cache_dtype": "fp8", "k_scale": 0.5, "v_scale": 2.0},
    "wide-values": {"head_size": 32, "head_size_v": 64},
}


def _needs_lse(subject: Subject, case: Case) -> tuple[Reason, ...]:
    request = case.request.with_options(needs_lse=True)
    return subject.capability.check(request, subject.facts)


def _values(depth: Depth, fit: Fit) -> Iterator[Case]:
    for name, fields in _FEATURES.items():
        yield from over_shapes(fit, depth, name, **fields)
    yield fit.case("encoder", (5, 3), (5, 3), attn_type=AttentionType.ENCODER_ONLY)
    # No two of rows and heads are equal, so that no transposition fits by chance.
    yield fit.case("shape", (1, 6), (9, 11), num_heads=6, num_kv_heads=3, num_padding_rows=2)


def _check_values(subject: Subject, case: Case) -> None:
    batch = subject.batch(case)
    answer_of(subject, batch).hold(subject.engine(batch).run(batch, with_lse=True))


def _halves(depth: Depth, fit: Fit) -> Iterator[Case]:
    n = fit.block_size
    # Single queries: each sees all keys of either half, as a decode of that half.
    for name in ("plain", "scale", "softcap", "fp8"):
        yield fit.case(name, (1, 1), (3 * n + 1, 4 * n), **_FEATURES[name])
    yield fit.case("empty-half", (1, 1), (n, 3 * n))
    if depth is Depth.FULL:
        yield fit.case("long", (1, 1), (800, 3000))


def _check_halves(subject: Subject, case: Case) -> None:
    """Attend to leading blocks and to the rest as two calls, and merge them."""
    batch = subject.batch(case)
    engine = subject.engine(batch)
    answer = answer_of(subject, batch)
    engine.write(batch)
    cut = case.block_size
    first = _part(batch, [min(cut, length) for length in case.seq_lens], 0)
    second = _part(batch, [max(0, length - cut) for length in case.seq_lens], cut)
    parts = [engine.run(half, with_lse=True) for half in (first, second)]
    _hold_merged(answer, parts)


def _part(batch: Batch, seq_lens: list[int], start: int) -> Batch:
    """Return the batch over seq_lens keys from a block's begin on, which read the cache alone."""
    table = batch.common.block_table
    if table is None:
        raise TypeError("the cases of this rule have a table")
    common = CommonAttentionMetadata.from_lengths(
        query_lens=batch.case.query_lens,
        seq_lens=seq_lens,
        block_table=table[:, start // batch.case.block_size :],
        device=batch.device,
    )
    return replace(batch, common=common, key=None, value=None)


def _hold_merged(answer: Answer, parts: list[Result]) -> None:
    (first, first_lse), (second, second_lse) = [(part.output, part.lse) for part in parts]
    if first_lse is None or second_lse is None:
        raise TypeError("the LSE was asked for")
    output, lse = merge_attn_states(first.float(), first_lse, second.float(), second_lse)
    answer.hold(Result(output=output.to(first.dtype), lse=lse.to(torch.float32)), "merged halves")


RULES = (
    Rule(
        name="lse",
        contract="The LSE is the natural logarithm of the output's denominator, float32, (Hq, T).",
        make=_values,
        check=_check_values,
        excluded=_needs_lse,
    ),
    Rule(
        name="merged_halves",
        contract="Results over two halves of the keys, merged by their LSE, equal the whole.",
        make=_halves,
        check=_check_halves,
        excluded=_needs_lse,
    ),
)
