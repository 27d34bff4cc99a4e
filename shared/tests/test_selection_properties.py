"""What holds of every selection, over made-up backends and requests."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from attn_shared_fakes import GPU, backend, capability, registry_of
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from attn_shared.capability import Capability, Support
from attn_shared.choice import select
from attn_shared.dtypes import KVCacheLayout
from attn_shared.errors import BackendRejectedError, InvalidRequestError, NoBackendError
from attn_shared.inventory import Inventory
from attn_shared.limits import MultipleOf, SizeSet
from attn_shared.registry import BackendRegistry
from attn_shared.request import AttentionRequest, AttentionType, MLADims, Phase
from attn_shared.selection import Policy, Selection, VerdictStatus
from attn_shared.selector import Selector

FEATURES = (
    "sinks",
    "window",
    "two_sided_window",
    "chunked_local",
    "softcap",
    "alibi",
    "non_causal",
    "per_request_causal",
    "mm_prefix",
    "batch_invariant",
    "kv_connector",
    "per_head_quant_scales",
    "lse",
    "flash_attn_version",
    "dcp",
    "pcp",
)

LAYOUTS = (KVCacheLayout.NHD, KVCacheLayout.HND)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CACHES = ("auto", "float16", "fp8", "int8_per_token_head")
TYPES = tuple(AttentionType)

STRICTER: tuple[dict[str, Any], ...] = (
    {"has_sinks": True},
    {"window": (63, 0)},
    {"window": (63, 63)},
    {"chunk_size": 64},
    {"softcap": 30.0},
    {"has_alibi": True},
    {"use_mm_prefix": True},
    {"batch_invariant": True},
    {"use_kv_connector": True},
    {"per_head_quant_scales": True},
    {"needs_lse": True},
    {"flash_attn_version": 3},
    {"dcp_size": 2},
    {"pcp_size": 2},
    {"block_size": 24},
    {"kv_layout": KVCacheLayout.HND},
    {"non_causal": True},
    {"per_request_causal": True},
    {"phase": Phase.MIXED},
)
"""Changes that ask for more of what was not asked for before."""


@st.composite
def capabilities(draw: st.DrawFn) -> Capability:
    features = {name: draw(st.sampled_from(Support)) for name in FEATURES}
    return capability(
        dtypes=frozenset(draw(st.sets(st.sampled_from(DTYPES), min_size=1))),
        head_sizes=SizeSet.of(*draw(st.sets(st.sampled_from([64, 128, 576]), min_size=1))),
        kv_cache_dtypes=frozenset(draw(st.sets(st.sampled_from(CACHES)))),
        block_sizes=draw(st.sampled_from([(), (MultipleOf(8),), (16, 24), (64,)])),
        attn_types=frozenset(draw(st.sets(st.sampled_from(TYPES), min_size=1))),
        phases=frozenset(draw(st.sets(st.sampled_from(Phase), min_size=1))),
        kv_layouts=draw(st.sampled_from([LAYOUTS, LAYOUTS[:1], LAYOUTS[1:]])),
        is_mla=draw(st.booleans()),
        **features,
    )


@st.composite
def requests(draw: st.DrawFn) -> AttentionRequest:
    changes: dict[str, Any] = {}
    for change in draw(st.lists(st.sampled_from(STRICTER), max_size=3)):
        changes |= change
    heads: dict[str, Any] = {"num_heads": 8, "num_kv_heads": 2, "head_size": 64}
    if draw(st.booleans()):
        heads = {"num_heads": 8, "num_kv_heads": 1, "head_size": 576, "mla": MLADims()}
    plain = {
        "dtype": draw(st.sampled_from(DTYPES)),
        "kv_cache_dtype": draw(st.sampled_from(CACHES)),
        "attn_type": draw(st.sampled_from(TYPES)),
        "phase": draw(st.sampled_from(Phase)),
    }
    return AttentionRequest(**{**heads, **plain, **changes})


def registry_with(*served: Capability) -> BackendRegistry:
    def of(found: Capability) -> Any:
        return lambda device, inventory: found

    return registry_of(*(backend(f"B{i}", of(found)) for i, found in enumerate(served)))


def answer(
    request: AttentionRequest, registry: BackendRegistry, policy: Policy | None = None
) -> Selection:
    """The selection, or the one that the refusal holds."""
    try:
        return select(request, GPU, Inventory(), policy, registry=registry)
    except NoBackendError as error:
        return held_by(error)


def held_by(error: NoBackendError) -> Selection:
    """The verdicts of a refusal."""
    assert error.selection is not None
    return error.selection


def serving(selection: Selection) -> set[str]:
    usable = (VerdictStatus.CHOSEN, VerdictStatus.ELIGIBLE)
    return {verdict.name for verdict in selection.verdicts if verdict.status in usable}


many = settings(derandomize=True, max_examples=60, deadline=None)


@given(served=capabilities(), feature=st.sampled_from(FEATURES), asked=requests())
@many
def test_a_new_capability_never_removes_a_candidate(
    served: Capability, feature: str, asked: AttentionRequest
) -> None:
    more = replace(served, **{feature: Support.YES})
    before, after = (set(found.check(asked, GPU)) for found in (served, more))
    assert after <= before


@given(
    served=capabilities(),
    more=capabilities(),
    field=st.sampled_from(["dtypes", "kv_cache_dtypes", "attn_types", "phases"]),
    asked=requests(),
)
@many
def test_nor_does_a_wider_set(
    served: Capability, more: Capability, field: str, asked: AttentionRequest
) -> None:
    wider = replace(served, **{field: getattr(served, field) | getattr(more, field)})
    codes = {reason.code for reason in wider.check(asked, GPU)}
    assert codes <= {reason.code for reason in served.check(asked, GPU)}


@given(served=capabilities(), asked=requests(), change=st.sampled_from(STRICTER))
@many
def test_a_stricter_request_never_gains_a_backend(
    served: Capability, asked: AttentionRequest, change: dict[str, Any]
) -> None:
    (field,) = change
    default = AttentionRequest(num_heads=8, num_kv_heads=2, head_size=64)
    assume(field == "phase" or getattr(asked, field) == getattr(default, field))
    try:
        stricter = asked.with_options(**change)
    except InvalidRequestError:
        return  # what no backend may accept gains none
    if served.check(asked, GPU):
        assert served.check(stricter, GPU)


@given(
    served=st.lists(capabilities(), min_size=1, max_size=4),
    newcomer=capabilities(),
    asked=requests(),
)
@many
def test_a_new_backend_takes_nobody_away(
    served: list[Capability], newcomer: Capability, asked: AttentionRequest
) -> None:
    before = answer(asked, registry_with(*served))
    after = answer(asked, registry_with(*served, newcomer))
    assert serving(before) <= serving(after)
    for verdict in before.verdicts:
        now = after.verdict(verdict.name)
        assert (now.reasons, now.detail) == (verdict.reasons, verdict.detail)


@given(
    served=st.lists(capabilities(), min_size=2, max_size=4),
    asked=requests(),
    named=st.integers(0, 3),
    required=st.booleans(),
)
@many
def test_a_named_backend_is_never_replaced(
    served: list[Capability], asked: AttentionRequest, named: int, required: bool
) -> None:
    registry = registry_with(*served)
    name = f"B{named % len(served)}"
    policy = Policy(required=name) if required else Policy(backend=name)
    free = answer(asked, registry)
    try:
        found = select(asked, GPU, Inventory(), policy, registry=registry)
    except BackendRejectedError as error:
        found = held_by(error)
    assert found.chosen == (name if name in serving(free) else None)
    assert serving(found) == serving(free)


@given(served=st.lists(capabilities(), max_size=5), asked=requests())
@many
def test_every_candidate_has_one_verdict_and_every_refusal_a_reason(
    served: list[Capability], asked: AttentionRequest
) -> None:
    found = answer(asked, registry_with(*served))
    assert sorted(v.name for v in found.verdicts) == [f"B{i}" for i in range(len(served))]
    chosen = [v.name for v in found.verdicts if v.status is VerdictStatus.CHOSEN]
    assert chosen == ([] if found.chosen is None else [found.chosen])
    for verdict in found.verdicts:
        assert bool(verdict.reasons) == (verdict.status is VerdictStatus.REJECTED)
        assert bool(verdict.steps()) == (verdict.status is not VerdictStatus.CHOSEN)
    assert (found.chosen is None) == (not serving(found))


@given(served=st.lists(capabilities(), min_size=1, max_size=4), asked=requests())
@many
def test_asking_is_repeatable_and_leaves_no_trace(
    served: list[Capability], asked: AttentionRequest
) -> None:
    registry = registry_with(*served)
    first = answer(asked, registry)
    generation, modules, environ = registry.generation, set(sys.modules), dict(os.environ)
    assert answer(asked, registry).to_dict() == first.to_dict()
    assert (registry.generation, set(sys.modules)) == (generation, modules)
    assert dict(os.environ) == environ


@given(served=st.lists(capabilities(), min_size=1, max_size=4), asked=requests())
@settings(derandomize=True, max_examples=10, deadline=None)
def test_threads_agree(served: list[Capability], asked: AttentionRequest) -> None:
    registry = registry_with(*served)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: answer(asked, registry).to_dict(), range(16)))
    assert all(each == found[0] for each in found)


@given(first=capabilities(), second=capabilities(), asked=requests())
@many
def test_a_backend_registered_anew_is_seen_at_once(
    first: Capability, second: Capability, asked: AttentionRequest
) -> None:
    """Through the selector, whose cache kept the answer before."""

    def ask() -> tuple[str, ...]:
        try:
            found = selector.resolve(asked, GPU)
        except NoBackendError as error:
            found = held_by(error)
        return tuple(reason.code for reason in found.verdict("B0").reasons)

    def codes(served: Capability) -> tuple[str, ...]:
        return tuple(reason.code for reason in served.check(asked, GPU))

    registry = registry_with(first)
    selector = Selector(registry)
    assert ask() == codes(first)
    registry.clear_override("B0")
    registry.register("B0", backend("B0", lambda device, inventory: second))
    assert ask() == codes(second)
