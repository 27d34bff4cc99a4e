"""Which tensors a call takes, writes and leaves alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace

import torch
from torch import Tensor

from attn_conformance._caches import raw_bytes
from attn_conformance.batch import Batch
from attn_conformance.case import Case
from attn_conformance.checks import answer_of, check_numbers, require
from attn_conformance.engine import Result
from attn_conformance.fit import Fit
from attn_conformance.rule import Depth, Rule
from attn_conformance.rules._shapes import over_shapes
from attn_conformance.subject import Subject
from attn_shared.request import AttentionType

__all__ = ["RULES"]

_GUARD = 3  # rows before and after an output, which stay as they are
_UNTOUCHED = 12288.0  # exact in every dtype
_FAR_ID = 2**30  # no cache has such a block


def _with_padding(depth: Depth, fit: Fit) -> Iterator[Case]:
    yield from over_shapes(fit, depth, num_padding_rows=2)
    yield _encoder(fit)


def _encoder(fit: Fit) -> Case:
    return fit.case("encoder", (5, 3), (5, 3), attn_type=AttentionType.ENCODER_ONLY)


def _check_in_place(subject: Subject, case: Case) -> None:
    batch = subject.batch(case)
    engine = subject.engine(batch)
    metadata = engine.plan(batch)
    engine.write(batch)
    rows, heads = batch.query.shape[:2]
    buffer = batch.query.new_full((rows + 2 * _GUARD, heads, case.value_size), _UNTOUCHED)
    output = buffer[_GUARD : _GUARD + rows]
    result = engine.forward(batch, metadata, output=output)
    is_same = isinstance(result.output, Tensor) and result.output.data_ptr() == output.data_ptr()
    require(is_same, "forward returns another tensor than the output that it was handed")
    answer_of(subject, batch).hold(Result(output=output))
    guards = torch.cat([buffer[:_GUARD], buffer[_GUARD + rows :]])
    require(bool((guards == _UNTOUCHED).all()), f"rows beside the output were written in {case}")


def _check_own_output(subject: Subject, case: Case) -> None:
    batch = subject.batch(case)
    engine = subject.engine(batch)
    metadata = engine.plan(batch)
    engine.write(batch)
    answer_of(subject, batch).hold(engine.forward(batch, metadata), "output=None")


def _cache_alone(depth: Depth, fit: Fit) -> Iterator[Case]:
    yield from over_shapes(fit, depth, writes=False)


def _views(depth: Depth, fit: Fit) -> Iterator[Case]:
    yield from over_shapes(fit, depth)


def _check_wide_table(subject: Subject, case: Case) -> None:
    """Hand over the leading rows and columns of a table that an engine made for more."""
    batch = subject.batch(case)
    table = batch.common.block_table
    if table is None:
        raise TypeError("the cases of this rule have a table")
    rows, columns = table.shape
    buffer = table.new_full((rows + 3, columns + 5), _FAR_ID)
    buffer[:rows, :columns] = table
    common = batch.common.with_fields(block_table=buffer[:rows, :columns])
    answer_of(subject, batch).hold(subject.engine(batch).run(replace(batch, common=common)))


def _check_strided(subject: Subject, case: Case) -> None:
    batch = subject.batch(case)
    if batch.key is None or batch.value is None:
        raise TypeError("the cases of this rule bring keys")
    parts = (batch.query, batch.key, batch.value)
    fused = torch.cat([part.flatten(1) for part in parts], dim=1)
    widths = [part[0].numel() for part in parts]
    query, key, value = (
        piece.unflatten(1, part.shape[1:])
        for piece, part in zip(fused.split(widths, dim=1), parts, strict=True)
    )
    answer = answer_of(subject, batch)
    answer.hold(subject.engine(batch).run(replace(batch, query=query, key=key, value=value)))


def _unchanged(depth: Depth, fit: Fit) -> Iterator[Case]:
    yield from over_shapes(fit, depth, num_padding_rows=2)
    yield fit.case("sinks", (1, 3), (5, 7), has_sinks=True)
    yield fit.case("alibi", (1, 3), (5, 7), has_alibi=True)
    yield fit.case("softcap", (1, 3), (5, 7), softcap=2.0)
    yield fit.case("window", (1, 3), (5, 7), window=(2, 0))
    scales = {"k_scale": (0.5, 2.0), "v_scale": (2.0, 0.25)}
    yield fit.case("scales", (1, 3), (5, 7), kv_cache_dtype="fp8", **scales)
    cross = AttentionType.ENCODER_DECODER
    yield fit.case("cross", (1, 3), (5, 7), attn_type=cross)
    yield _encoder(fit)


def _check_inputs_unchanged(subject: Subject, case: Case) -> None:
    batch = subject.batch(case)
    before = {name: _bytes_of(tensor) for name, tensor in _inputs(batch).items()}
    engine = subject.engine(batch)
    for with_lse in (False, True)[: 1 + subject.returns_lse_of(case)]:
        engine.run(batch, with_lse=with_lse)
    for name, tensor in _inputs(batch).items():
        is_same = torch.equal(_bytes_of(tensor), before[name])
        require(is_same, f"{name} was modified in {case}")


def _inputs(batch: Batch) -> dict[str, Tensor]:
    """Return every tensor that a step only reads."""
    found = {name: getattr(batch, name) for name in ("query", "key", "value")}
    found |= {name: getattr(batch.layer, name) for name in batch.layer.__slots__}
    found |= {f"common.{f.name}": getattr(batch.common, f.name) for f in fields(batch.common)}
    return {name: value for name, value in found.items() if isinstance(value, Tensor)}


def _bytes_of(tensor: Tensor) -> Tensor:
    return raw_bytes(tensor).clone()


def _cached(depth: Depth, fit: Fit) -> Iterator[Case]:
    yield from over_shapes(fit, depth, num_padding_rows=2)
    yield fit.case("fp8", (1, 3), (5, 7), kv_cache_dtype="fp8", k_scale=0.5, v_scale=2.0)
    yield fit.case("int8", (1, 3), (5, 7), kv_cache_dtype="int8_per_token_head")


def _check_cache_unchanged(subject: Subject, case: Case) -> None:
    batch = subject.batch(case)
    if batch.kv_cache is None:
        raise TypeError("the cases of this rule have a cache")
    engine = subject.engine(batch)
    metadata = engine.plan(batch)
    if subject.backend.forward_includes_kv_cache_update:
        engine.forward(batch, metadata)  # the first call writes, a second has nothing new to write
    engine.write(batch)
    before = _bytes_of(batch.kv_cache)
    engine.forward(batch, metadata, with_lse=subject.returns_lse_of(case))
    is_same = torch.equal(_bytes_of(batch.kv_cache), before)
    require(is_same, f"forward modified the cache in {case}")


RULES = (
    Rule(
        name="output_in_place",
        contract="Output (T, Hq, Dv) is written in place and returned.",
        make=_with_padding,
        check=_check_in_place,
    ),
    Rule(
        name="output_none",
        contract="output=None returns the kernel's own tensor, (T, Hq, Dv).",
        make=_with_padding,
        check=_check_own_output,
    ),
    Rule(
        name="cache_alone",
        contract="Key and value may be None: then the cache alone is read.",
        make=_cache_alone,
        check=check_numbers,
    ),
    Rule(
        name="strided_inputs",
        contract="Query, key and value that are views of one projection work.",
        make=_views,
        check=_check_strided,
    ),
    Rule(
        name="wide_table",
        contract="The block table may be a view of a larger one.",
        make=_views,
        check=_check_wide_table,
    ),
    Rule(
        name="inputs_unchanged",
        contract="Nothing that a step only reads is modified: tensors, scales, the batch.",
        make=_unchanged,
        check=_check_inputs_unchanged,
    ),
    Rule(
        name="cache_unchanged",
        contract="forward writes no cache unless it declares to.",
        make=_cached,
        check=_check_cache_unchanged,
    ),
)
