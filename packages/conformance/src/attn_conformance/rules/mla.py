"""What attention over latents computes: decodes, prefills, earlier keys, heads and widths."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import torch

from attn_conformance.case import Case, TableStyle
from attn_conformance.checks import must_refuse, require
from attn_conformance.fit import Fit
from attn_conformance.mla_batch import MLABatch
from attn_conformance.mla_engine import (
    MLAResult,
    check_mla_numbers,
    hold,
    mla_batch,
    mla_engine,
)
from attn_conformance.rule import Depth, Rule
from attn_conformance.subject import Subject
from attn_shared.capability import Support
from attn_shared.dtypes import COMPUTE_DTYPES
from attn_shared.errors import AttnError
from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.mla_metadata import MLAQuerySupport
from attn_shared.request import MLADims

__all__ = ["RULES"]

_HEADS = (1, 2, 5, 8, 12, 16, 32, 40, 64, 128)
_DEEPSEEK = MLADims()
_WIDTHS = {
    "deepseek": _DEEPSEEK,
    "narrow": MLADims(kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8),
    "wide-rope": MLADims(kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=32, v_head_dim=16),
    "wide-values": MLADims(kv_lora_rank=32, qk_nope_head_dim=8, qk_rope_head_dim=16, v_head_dim=64),
    "256": MLADims(kv_lora_rank=256, qk_nope_head_dim=64, qk_rope_head_dim=64, v_head_dim=64),
    "192-256": MLADims(kv_lora_rank=512, qk_nope_head_dim=192, qk_rope_head_dim=64, v_head_dim=256),
}


def _decodes(depth: Depth, fit: Fit) -> Iterator[Case]:
    n = fit.block_size
    yield fit.mla_case("short", (1, 1, 1), (1, n, n + 1))
    yield fit.mla_case("one", (1,), (3 * n - 1,))
    yield fit.mla_case("long", (1, 1), (37 * n + 3, 5))
    yield fit.mla_case("uneven", (1,) * 7, (2, 9 * n, 1, n - 1, 4 * n, 13, 30 * n))
    yield fit.mla_case("sharp", (1, 1), (3 * n, 2 * n + 1), query_factor=8.0)
    for name in COMPUTE_DTYPES:
        yield fit.mla_case(name, (1,) * 5, (2, 9 * n, n, 13, 5 * n + 1), dtype=_dtype(name))


def _dtype(name: str) -> torch.dtype:
    return COMPUTE_DTYPES[name]


def _check_decodes(subject: Subject, case: Case) -> None:
    """Rows of one token are decodes in every backend, so that `forward_mqa` is what is tried."""
    batch = mla_batch(subject, case)
    metadata = mla_engine(subject, batch).builder.build(0, batch.common)
    require(
        metadata.num_decode_tokens == case.num_tokens,
        f"{metadata.num_decode_tokens} of {case.num_tokens} rows are decodes in {case}",
    )
    check_mla_numbers(subject, case)


def _drafts(depth: Depth, fit: Fit) -> Iterator[Case]:
    n = fit.block_size
    for length in (2, 3, 4, 8) if depth is Depth.FULL else (2, 4):
        lens = (length, 3 * n, n + length, 7 * n + 1)
        yield fit.mla_case(f"{length}-tokens", (length,) * 4, lens)
    yield fit.mla_case("padded", (2, 2, 2), (n + 1, 0, 2 * n))


def _varlen(depth: Depth, fit: Fit) -> Iterator[Case]:
    n = fit.block_size
    yield fit.mla_case("rising", (1, 2, 3, 4), (n, 2 * n + 1, 3, 5 * n))
    yield fit.mla_case("falling", (8, 5, 2, 1), (2 * n + 8, 4 * n, n + 2, 9))
    yield fit.mla_case("without-tokens", (1, 0, 2, 0, 1), (n + 1, n, 2 * n, 0, 3))
    yield fit.mla_case("beside-prefills", (1, 3, 2, 2 * n + 9), (2 * n, 3 * n, n, 2 * n + 9))


def _prefills(depth: Depth, fit: Fit) -> Iterator[Case]:
    n = fit.block_size
    yield fit.mla_case("one", (3 * n + 9,), (3 * n + 9,))
    yield fit.mla_case("ragged", (n + 9, 17, 40), (n + 9, 17, 40))
    yield fit.mla_case("sharp", (33, 20), (33, 20), query_factor=8.0)
    for name in COMPUTE_DTYPES:
        yield fit.mla_case(name, (2 * n + 9, 33), (2 * n + 9, 33), dtype=_dtype(name))


def _contexts(depth: Depth, fit: Fit) -> Iterator[Case]:
    n = fit.block_size
    yield fit.mla_case("one", (n + 12,), (9 * n + 3,))
    yield fit.mla_case("several", (12, n + 9, 20), (3 * n + 12, 5 * n + 9, 20 + 7 * n))
    yield fit.mla_case("some", (20, 16, 24, 18), (20 + 2 * n, 16, 24 + n, 18))
    yield fit.mla_case("beside-decodes", (1, 1, 20, n + 9), (5 * n, n, 20 + 4 * n, n + 9))
    half = _dtype("bfloat16")
    yield fit.mla_case("bfloat16", (12, n + 9), (6 * n + 12, 5 * n + 9), dtype=half)


def _check_contexts(subject: Subject, case: Case) -> None:
    """In one chunk, and in as many as a workspace of a byte makes of it."""
    check_mla_numbers(subject, case)
    check_mla_numbers(subject, case, mla_workspace_bytes=1)


def _mixed(depth: Depth, fit: Fit) -> Iterator[Case]:
    n = fit.block_size
    yield fit.mla_case("in-order", (1, 1, 30, n + 9), (2 * n, 9, 30 + n, n + 9))
    yield fit.mla_case("out-of-order", (30, 1, n + 9, 1), (30 + n, 2 * n, n + 9, 9))
    yield fit.mla_case("one-token-prompt", (1, 20, 1), (n, 20, 1))


def _check_mixed(subject: Subject, case: Case) -> None:
    """An engine orders the batch; a builder that needs the order says so where it is missing."""
    check_mla_numbers(subject, case)
    batch = mla_batch(subject, case)
    engine = mla_engine(subject, batch)
    if engine.ordered(batch) is not batch:
        with must_refuse("a decode behind a longer row", "order"):
            engine.builder.build(0, batch.common)


def _split(depth: Depth, fit: Fit) -> Iterator[Case]:
    n = fit.block_size
    yield fit.mla_case("singles", (1, 1, 1, 30), (n, 9, 1, 30 + n))
    yield fit.mla_case("uniform", (2, 2, 2, 30), (n, 9, 2, 30))
    yield fit.mla_case("mixed", (1, 2, 3, 30), (n, 9, 3, 30))
    yield fit.mla_case("empty", (1, 0, 1, 0), (n, 0, 9, 0))


def _check_split(subject: Subject, case: Case) -> None:
    batch = mla_batch(subject, case)
    builder = mla_engine(subject, batch).builder
    metadata = builder.build(0, batch.common)
    rows, count = case.query_lens[: metadata.num_decodes], metadata.num_decode_tokens
    words = f"decodes of {list(rows)} tokens in {case}"
    require(sum(rows) == count, f"num_decode_tokens={count} with {words}")
    require(metadata.num_tokens == case.num_tokens, f"num_tokens={metadata.num_tokens} in {case}")
    limit = builder.reorder_batch_threshold or 1
    require(all(length <= limit for length in rows), f"threshold {limit} with {words}")
    if builder.query_support is MLAQuerySupport.SINGLE:
        require(set(rows) <= {1}, f"query_support=single with {words}")
    if builder.query_support is MLAQuerySupport.UNIFORM:
        require(len(set(rows)) <= 1, f"query_support=uniform with {words}")
    hold(mla_engine(subject, batch).run(batch))


def _heads(depth: Depth, fit: Fit) -> Iterator[Case]:
    n = fit.block_size
    for heads in _HEADS:
        lens = ((1, 1, 2, 20), (n + 1, 3 * n, n, 20 + n))
        yield fit.mla_case(f"{heads}", *lens, num_heads=heads)


def _check_heads(subject: Subject, case: Case) -> None:
    """Each number is right, or refused when the layer is built, with the number."""
    try:
        mla_engine(subject, mla_batch(subject, case))
    except AttnError as error:
        said = f"{case.num_heads} heads are refused without the number: {error}"
        require(str(case.num_heads) in str(error), said)
        return
    check_mla_numbers(subject, case)


def _widths(depth: Depth, fit: Fit) -> Iterator[Case]:
    n = fit.block_size
    for name, dims in _WIDTHS.items():
        yield fit.mla_case(name, (1, 1, 20), (2 * n + 1, n, 20 + n), mla=dims)


def _scales(depth: Depth, fit: Fit) -> Iterator[Case]:
    n = fit.block_size
    for scale in (0.05, 0.4, 1.0, -0.4, 0.0):
        yield fit.mla_case(f"{scale}", (1, 1, 20), (2 * n + 1, n, 20 + n), scale=scale)


def _invariant(depth: Depth, fit: Fit) -> Iterator[Case]:
    n = fit.block_size
    lens = ((1, 1, 1, 24, 33), (3 * n + 1, n, 9 * n, 24 + 3 * n, 33))
    yield fit.mla_case("mixed", *lens, batch_invariant=True)
    yield fit.mla_case("decodes", (1,) * 5, (2, 9 * n, n, 13, 5 * n + 1), batch_invariant=True)


def _check_invariant(subject: Subject, case: Case) -> None:
    """Each request alone gives the bits that it has among others."""
    batch = mla_batch(subject, case)
    engine = mla_engine(subject, batch, mla_workspace_bytes=1)
    whole = engine.run(batch)
    starts = whole.batch.common.query_start_loc_cpu.tolist()
    found = [_row(whole, start, stop) for start, stop in pairwise(starts)]
    hold(whole)
    for index in range(batch.common.num_reqs):
        alone = engine.run(_alone(whole.batch, index))
        own = _row(alone, 0, alone.metadata.num_tokens)
        words = f"request {index} has other bits alone than among others in {case}"
        require(torch.equal(own, found[index]), words)


def _row(result: MLAResult, start: int, stop: int) -> torch.Tensor:
    count = result.metadata.num_decode_tokens
    if start < count:
        return result.latents[start:stop].clone()
    return result.values[start - count : stop - count].clone()


def _alone(batch: MLABatch, index: int) -> MLABatch:
    """Return one request of a batch as a batch of its own."""
    common, lens = batch.common, batch.case
    if common.block_table is None or common.slot_mapping is None:
        raise TypeError("the cases of this rule have a cache")
    start, stop = common.query_start_loc_cpu[index : index + 2].tolist()
    case = lens.with_fields(
        query_lens=lens.query_lens[index : index + 1], seq_lens=lens.seq_lens[index : index + 1]
    )
    own = CommonAttentionMetadata.from_lengths(
        query_lens=case.query_lens,
        seq_lens=case.seq_lens,
        block_table=common.block_table[index : index + 1],
        slot_mapping=common.slot_mapping[start:stop],
        block_size=common.block_size,
        device=batch.device,
    )
    rows = {
        name: getattr(batch, name)[start:stop] for name in ("query", "absorbed", "latent", "rope")
    }
    return replace(batch, case=case, common=own, **rows)


def _non_causal(depth: Depth, fit: Fit) -> Iterator[Case]:
    n = fit.block_size
    yield fit.mla_case("drafts", (3, 3), (2 * n, n + 3), causal=False)
    yield fit.mla_case("long", (20, n + 9), (20 + n, 3 * n + 9), causal=False)


def _lse(depth: Depth, fit: Fit) -> Iterator[Case]:
    n = fit.block_size
    yield fit.mla_case("decodes", (1, 1, 1), (3 * n + 1, n, 1))
    yield fit.mla_case("prefills", (20, n + 9), (20, 3 * n + 9))
    yield fit.mla_case("mixed", (1, 20), (3 * n, 2 * n + 20))


def _check_lse(subject: Subject, case: Case) -> None:
    batch = mla_batch(subject, case)
    require(
        subject.capability.lse is Support.NO or mla_engine(subject, batch).impl.can_return_lse,
        "the capability has an LSE, and can_return_lse is False",
    )
    if subject.returns_lse_of(case):
        hold(mla_engine(subject, batch).run(batch, with_lse=True), "with LSE")


def _generated(depth: Depth, fit: Fit) -> Iterator[Case]:
    """Random batches in random order: lengths, earlier keys, padding, tables, block sizes."""
    for seed in range(48 if depth is Depth.FULL else 12):
        draw = random.Random(seed)
        block = fit.block_size * draw.choice((1, 1, 2, 4))
        lens = [_drawn_lengths(draw, block) for _ in range(draw.randint(1, 7))]
        yield fit.mla_case(
            f"{seed}",
            [query_len for query_len, _ in lens],
            [seq_len for _, seq_len in lens],
            block_size=block,
            table=draw.choice((TableStyle.SHUFFLED, TableStyle.ORDERED, TableStyle.REPEATED)),
            num_padding_rows=draw.choice((0, 0, 3)),
            seed=seed,
        )


def _drawn_lengths(draw: random.Random, block: int) -> tuple[int, int]:
    """Draw the query tokens of a request and its keys; 0 keys are padding."""
    query_len = draw.choice((1, 1, 1, draw.randint(2, 8), draw.randint(9, 60)))
    if draw.random() < 0.1:
        return query_len, 0
    return query_len, query_len + draw.choice((0, 1, block, draw.randint(0, 12 * block)))


RULES = (
    Rule(
        name="mla_decode",
        contract="Rows of one token attend to the latents of their request.",
        make=_decodes,
        check=_check_decodes,
    ),
    Rule(
        name="mla_drafts",
        contract="Rows of several tokens, all alike, see keys up to their own.",
        make=_drafts,
        check=check_mla_numbers,
    ),
    Rule(
        name="mla_varlen",
        contract="Short rows may differ in length, and have none.",
        make=_varlen,
        check=check_mla_numbers,
    ),
    Rule(
        name="mla_prefill",
        contract="Prompts attend with expanded heads.",
        make=_prefills,
        check=check_mla_numbers,
    ),
    Rule(
        name="mla_context",
        contract="Keys of earlier steps count alike however many chunks they are read in.",
        make=_contexts,
        check=_check_contexts,
    ),
    Rule(
        name="mla_mixed",
        contract="Decodes and prefills share a batch, in the order that the builder needs.",
        make=_mixed,
        check=_check_mixed,
    ),
    Rule(
        name="mla_split",
        contract="Decodes have the query lengths that the builder declares.",
        make=_split,
        check=_check_split,
    ),
    Rule(
        name="mla_heads",
        contract="Every number of heads is right, or refused with the number.",
        make=_heads,
        check=_check_heads,
    ),
    Rule(
        name="mla_widths",
        contract="Every width that the capability takes is right.",
        make=_widths,
        check=check_mla_numbers,
    ),
    Rule(
        name="mla_scale",
        contract="Logits are scaled as the layer says, never by a width.",
        make=_scales,
        check=check_mla_numbers,
    ),
    Rule(
        name="mla_non_causal",
        contract="Without a causal mask every row sees every key.",
        make=_non_causal,
        check=check_mla_numbers,
    ),
    Rule(
        name="mla_lse",
        contract="The LSE is the natural logarithm of the denominator, in both parts of a batch.",
        make=_lse,
        check=_check_lse,
    ),
    Rule(
        name="mla_invariance",
        contract="In batch-invariant mode a request's bits do not depend on its company.",
        make=_invariant,
        check=_check_invariant,
    ),
    Rule(
        name="mla_generated",
        contract="Random batches are right, in however many chunks.",
        make=_generated,
        check=_check_contexts,
    ),
)
