"""What a metadata builder is asked for beside `build`, and the groups of layers that it serves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from attn_conformance.batch import Batch
from attn_conformance.case import Case
from attn_conformance.checks import REFUSALS, answer_of
from attn_conformance.engine import Engine
from attn_conformance.fit import Fit
from attn_conformance.rule import Depth, Rule
from attn_conformance.rules._shapes import over_shapes
from attn_conformance.subject import Subject
from attn_shared.capability import Reason
from attn_shared.spec import BuildConfig

__all__ = ["RULES"]


def _steps(depth: Depth, fit: Fit) -> Iterator[Case]:
    yield from over_shapes(fit, depth, names=("decode", "extend", "mixed", "drafts"))


def _check_reused(subject: Subject, case: Case) -> None:
    """Run two layers, with other numbers in the same places, on one step's metadata."""
    first = subject.batch(case)
    engine = subject.engine(first)
    metadata = engine.plan(first)
    second = subject.batch(case)
    second = replace(second, query=second.query.neg(), common=first.common)
    for name, batch in (("first layer", first), ("second layer", second), ("again", first)):
        engine.write(batch)
        answer_of(subject, batch).hold(engine.forward(batch, metadata), name)


def _check_fast(subject: Subject, case: Case) -> None:
    batch = subject.batch(case)
    engine = subject.engine(batch, num_spec_tokens=2)
    answer = answer_of(subject, batch)
    plans = {
        "fast_build=True": engine.builder.build(0, batch.common, fast_build=True),
        "build_for_drafting": engine.builder.build_for_drafting(batch.common, 0),
    }
    engine.write(batch)
    for name, metadata in plans.items():
        answer.hold(engine.forward(batch, metadata), name)


def _check_updated_table(subject: Subject, case: Case) -> None:
    """Plan over one table, move to another: the answer is the other's."""
    first, second = subject.batch(case), subject.batch(case.with_fields(seed=case.seed + 1))
    engine = subject.engine(second)
    table, slots = second.common.block_table, second.common.slot_mapping
    if table is None or slots is None:
        raise TypeError("the cases of this rule have a table")
    metadata = engine.builder.update_block_table(engine.plan(first), table, slots)
    engine.write(second)
    answer_of(subject, second).hold(engine.forward(second, metadata))


def _has_update(subject: Subject, case: Case) -> tuple[Reason, ...]:
    if subject.backend.get_builder_cls().supports_update_block_table:
        return subject.excluded(case)
    return (Reason(code="supports_update_block_table", value="False", allowed="True here"),)


_OTHER_LAYERS: dict[str, dict[str, Any]] = {
    "scale": {"scale": 0.7},
    "window": {"window": (2, 0)},
    "softcap": {"softcap": 1.5},
    "sinks": {"has_sinks": True},
    "alibi": {"has_alibi": True},
}


def _groups(depth: Depth, fit: Fit) -> Iterator[Case]:
    """A plain layer and one that differs, named by the variant."""
    for name in _OTHER_LAYERS:
        yield from over_shapes(fit, depth, name, names=("mixed",), variant=name)


def _other_layer(case: Case) -> Case:
    return case.with_fields(**_OTHER_LAYERS[case.variant])


def _serves_both(subject: Subject, case: Case) -> tuple[Reason, ...]:
    return (*subject.excluded(case), *subject.excluded(_other_layer(case)))


def _check_group(subject: Subject, case: Case) -> None:
    """One builder for both: either it refuses, or one step's metadata is right for each."""
    batches = [subject.batch(case), subject.batch(_other_layer(case))]
    layers = {f"layer {index}": batch.spec for index, batch in enumerate(batches)}
    try:
        builder = subject.backend.get_builder_cls()(
            batches[0].spec.kv_cache_spec, layers, BuildConfig(), batches[0].device
        )
    except REFUSALS:
        return
    metadata = builder.build(0, batches[0].common)
    for name, batch in zip(layers, batches, strict=True):
        engine = Engine(
            backend=subject.backend,
            impl=subject.engine(batch).impl,
            builder=builder,
        )
        _hold(subject, engine, batch, metadata, name)


def _hold(subject: Subject, engine: Engine, batch: Batch, metadata: Any, name: str) -> None:
    engine.write(batch)
    answer_of(subject, batch).hold(engine.forward(batch, metadata), name)


RULES = (
    Rule(
        name="metadata_reused",
        contract="One step's metadata serves all layers of a group, and no call modifies it.",
        make=_steps,
        check=_check_reused,
    ),
    Rule(
        name="groups",
        contract="Layers that differ share one plan rightly, or the builder refuses them.",
        make=_groups,
        check=_check_group,
        excluded=_serves_both,
    ),
    Rule(
        name="fast_build",
        contract="A fast build, and one for drafting, give the same answer.",
        make=_steps,
        check=_check_fast,
    ),
    Rule(
        name="update_block_table",
        contract="Metadata moved to another block table gives that table's answer.",
        make=_steps,
        check=_check_updated_table,
        excluded=_has_update,
    ),
)
