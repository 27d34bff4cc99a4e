"""How a batch may be composed: its order, its company, its lengths, a shared prefix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from attn_conformance.batch import Batch
from attn_conformance.case import Case, TableStyle
from attn_conformance.checks import REFUSALS, answer_of, check_numbers, must_refuse, require
from attn_conformance.fit import Fit
from attn_conformance.rule import Depth, Rule
from attn_conformance.rules._shapes import over_shapes
from attn_conformance.subject import Subject
from attn_shared.metadata import CommonAttentionMetadata

__all__ = ["RULES"]


def _unordered(depth: Depth, fit: Fit) -> Iterator[Case]:
    n = fit.block_size
    yield fit.case("prefill-first", (n + 1, 1, 1), (n + 1, n, 2 * n + 1))
    yield fit.case("decode-between", (1, n, 1, 3, 1), (n, n, 2 * n, 3 * n, 2))
    prefilling = {"is_prefilling": (False, True, False)}
    yield fit.case("short-end-of-prompt", (1, 1, 1), (2 * n, n + 1, n), **prefilling)
    yield fit.case("extend-last", (1, n, 4), (n, n, 3 * n))
    yield fit.case("padding-first", (1, 1, 3), (0, n + 1, n))


def _check_unordered(subject: Subject, case: Case) -> None:
    """Hand the batch over as it stands: the answer is in its order, or it is refused."""
    batch = subject.batch(case)
    engine = subject.engine(batch)
    try:
        metadata = engine.plan(batch)
    except REFUSALS as error:
        must_order = engine.builder.requires_ordered_batch
        require(must_order, f"refused, though requires_ordered_batch is False: {error}")
        return
    engine.write(batch)
    answer_of(subject, batch).hold(engine.forward(batch, metadata))


def _drafts(depth: Depth, fit: Fit) -> Iterator[Case]:
    """Decodes with draft tokens, and prompts of few tokens, which look alike."""
    n = fit.block_size
    for length in (2, 3, 5):
        yield fit.case(f"{length}-tokens", (length,) * 3, (3 * n, n + length, length))
    yield fit.case("with-padding", (3, 3, 0), (3 * n, n + 3, 0))
    yield fit.case("with-short-prompt", (2, 2, 2), (3 * n, 2, n), is_prefilling=(False, True, True))


def _many(depth: Depth, fit: Fit) -> Iterator[Case]:
    n = fit.block_size
    count = 33
    lens = tuple(1 + (7 * i) % (3 * n) for i in range(count))
    yield fit.case("decodes", (1,) * count, lens)
    yield fit.case("mixed", (1,) * 20 + (n,) * 8, (*lens[:20], *(n + i for i in range(8))))


def _long_prompts(depth: Depth, fit: Fit) -> Iterator[Case]:
    """Prompts of several tiles, in the widths of heads that kernels for long ones are made for."""
    widths = [size for size in (128, 256) if size in fit.capability.head_sizes]
    served = widths or [fit.head_size]
    half = torch.bfloat16 if torch.bfloat16 in fit.capability.dtypes else fit.dtype
    pages = dict.fromkeys(fit.capability.block_size_for(size) for size in (16, 64))
    for size in served if depth is Depth.FULL else served[:1]:
        options: dict[str, Any] = {"num_kv_heads": 2, "head_size": size, "dtype": half}
        whole = (300, 130, 64)
        yield fit.case(f"whole-{size}", whole, whole, num_heads=8, **options)
        for page in pages:
            name = f"chunks-{size}-page-{page}"
            queries, keys = (1, 200, 65, 130), (90, 457, 320, 130)
            yield fit.case(name, queries, keys, num_heads=8, block_size=page, **options)


def _invariant(depth: Depth, fit: Fit) -> Iterator[Case]:
    """Long enough that a kernel with a choice of splits and tiles would choose by the company."""
    n = fit.block_size
    mode = {"batch_invariant": True}
    yield fit.case("decodes", (1, 1, 1, 1), (2 * n + 1, 300, n, 1000), **mode)
    yield fit.case("mixed", (1, 3, n + 1), (5 * n, 200, n + 1), **mode)
    yield fit.case("sinks", (1, 1, 2), (5 * n, 200, n + 1), **mode, has_sinks=True)
    half = torch.bfloat16 if torch.bfloat16 in fit.capability.dtypes else fit.dtype
    yield fit.case("bfloat16", (1, 1, 2), (5 * n, 200, n + 1), **mode, dtype=half)


def _check_invariant(subject: Subject, case: Case) -> None:
    """Every request alone, and the batch backwards, give the same bits."""
    batch = subject.batch(case)
    engine = subject.engine(batch)
    whole = engine.run(batch)
    answer_of(subject, batch).hold(whole)
    rows = _rows_of(case)
    count = len(case.query_lens)
    orders = [[index] for index in range(count)] + [list(reversed(range(count)))]
    for order in orders:
        part = subject.engine(batch).run(_selected(batch, order)).output
        expected = torch.cat([whole.output[rows[index]] for index in order])
        is_same = torch.equal(part[: len(expected)], expected)
        require(is_same, f"requests {order} give other bits than within the batch in {case}")


def _rows_of(case: Case) -> list[slice]:
    stops = torch.tensor(case.query_lens).cumsum(0).tolist()
    return [slice(stop - n, stop) for stop, n in zip(stops, case.query_lens, strict=True)]


def _selected(batch: Batch, order: Sequence[int]) -> Batch:
    """Return a batch of some requests in some order, over the same cache."""
    case, rows = batch.case, _rows_of(batch.case)
    index = torch.cat([torch.arange(rows[i].start, rows[i].stop) for i in order]).to(batch.device)
    table, slots = batch.common.block_table, batch.common.slot_mapping
    if table is None or slots is None or batch.key is None or batch.value is None:
        raise TypeError("the cases of this rule write a cache")
    common = CommonAttentionMetadata.from_lengths(
        query_lens=[case.query_lens[i] for i in order],
        seq_lens=[case.seq_lens[i] for i in order],
        block_table=table[list(order)],
        slot_mapping=slots[index],
        device=batch.device,
    )
    query, key, value = (rows[index] for rows in (batch.query, batch.key, batch.value))
    return replace(batch, common=common, query=query, key=key, value=value)


_PREFIX_FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "sinks": {"has_sinks": True},
    "softcap": {"softcap": 1.5},
    "fp8": {"kv_cache_dtype": "fp8", "k_scale": 0.5, "v_scale": 2.0},
}
_MAY_BE_REFUSED: dict[str, dict[str, Any]] = {
    "window": {"window": (5, 0)},
    "alibi": {"has_alibi": True},
}


def _cascade(depth: Depth, fit: Fit) -> Iterator[Case]:
    n = fit.block_size
    for name, fields in (_PREFIX_FEATURES | _MAY_BE_REFUSED).items():
        yield fit.case(
            f"decode-{name}",
            (1, 1, 1),
            (2 * n + 1, 4 * n, 3 * n + 2),
            common_prefix_len=2 * n,
            **fields,
        )
        yield fit.case(
            f"mixed-{name}", (1, 4, n), (3 * n, 4 * n, 4 * n + 1), common_prefix_len=n, **fields
        )
    yield fit.case("all-of-it", (1, 2), (2 * n + 1, 2 * n + 2), common_prefix_len=2 * n)
    yield fit.case("chunks", (1, 1), (3 * n, 4 * n), common_prefix_len=n, chunk_size=2 * n)


def _check_cascade(subject: Subject, case: Case) -> None:
    batch = subject.batch(case)
    engine = subject.engine(batch)
    may_refuse = case.window != (None, None) or case.has_alibi or case.chunk_size is not None
    if may_refuse:
        try:
            engine.plan(batch)
        except REFUSALS:
            return
    check_numbers(subject, case)


def _no_cascade(depth: Depth, fit: Fit) -> Iterator[Case]:
    n = fit.block_size
    if n > 1:
        yield fit.case("part-of-a-block", (1, 1), (3 * n, 4 * n), common_prefix_len=n)
    yield fit.case("longer-than-computed", (1, n + 1), (3 * n, 2 * n), common_prefix_len=n)
    yield fit.case("other-blocks", (1, 1), (3 * n, 4 * n), common_prefix_len=n)
    yield fit.case("negative", (1, 1), (3 * n, 4 * n), common_prefix_len=n)
    yield fit.case("non-causal", (1, 1), (3 * n, 4 * n), common_prefix_len=n, causal=False)


def _check_no_cascade(subject: Subject, case: Case) -> None:
    n = case.block_size
    prefix = {"part-of-a-block": n - 1, "longer-than-computed": 2 * n, "negative": -n}
    batch = subject.batch(case)
    if case.name == "other-blocks":
        batch = subject.batch(case.with_fields(common_prefix_len=0, table=TableStyle.SHUFFLED))
    engine = subject.engine(batch)
    length = prefix.get(case.name, case.common_prefix_len)
    with must_refuse(f"a common prefix of {length} tokens ({case.name})"):
        engine.builder.build(length, batch.common)


def _bounded(depth: Depth, fit: Fit) -> Iterator[Case]:
    slack: dict[str, Any] = {"seq_lens_slack": fit.block_size}
    yield from over_shapes(fit, depth, names=("decode", "extend", "mixed"), **slack)
    yield from over_shapes(fit, depth, "window", **slack, window=(3, 0))
    yield from over_shapes(fit, depth, "sinks", **slack, has_sinks=True)


def _check_bounded(subject: Subject, case: Case) -> None:
    if not subject.capability.needs_exact_host_lengths:
        check_numbers(subject, case)
        return
    batch = subject.batch(case)
    engine = subject.engine(batch)
    with must_refuse("host lengths that are upper bounds", "seq_lens"):
        engine.plan(batch)


RULES = (
    Rule(
        name="order",
        contract="Output rows stand in the batch's order; an order not served is refused.",
        make=_unordered,
        check=_check_unordered,
    ),
    Rule(
        name="drafts",
        contract="Decodes of several tokens and prompts of few are told apart, or served alike.",
        make=_drafts,
        check=check_numbers,
    ),
    Rule(
        name="many_requests",
        contract="Many requests are served as few are.",
        make=_many,
        check=check_numbers,
    ),
    Rule(
        name="long_prompts",
        contract="Prompts of hundreds of tokens, whole or after earlier ones, get the same answer.",
        make=_long_prompts,
        check=check_numbers,
    ),
    Rule(
        name="batch_invariance",
        contract="In batch-invariant mode results are bitwise equal whatever shares the batch.",
        make=_invariant,
        check=_check_invariant,
    ),
    Rule(
        name="cascade",
        contract="Cascade over a prefix that all share equals plain attention.",
        make=_cascade,
        check=_check_cascade,
    ),
    Rule(
        name="cascade_refused",
        contract="Cascade over anything that is no shared prefix of whole blocks is refused.",
        make=_no_cascade,
        check=_check_no_cascade,
    ),
    Rule(
        name="upper_bounds",
        contract="Host lengths may be upper bounds, unless exact ones are needed: then refused.",
        make=_bounded,
        check=_check_bounded,
    ),
)
