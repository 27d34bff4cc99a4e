from __future__ import annotations

import importlib
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from attn_shared_fakes import (
    CPU,
    GPU,
    FakeEntryPoint,
    backend,
    capability,
    library,
    registry_of,
    request,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from attn_shared.capability import Support
from attn_shared.choice import SelectionCache, contender, select
from attn_shared.device import preset
from attn_shared.dtypes import KVCacheLayout
from attn_shared.errors import (
    AttnError,
    BackendNotProvidedError,
    BackendRejectedError,
    NoBackendError,
    PlatformMissingError,
    UnknownNameError,
    VendorMissingError,
)
from attn_shared.inventory import Inventory, VendorStatus
from attn_shared.limits import SizeSet
from attn_shared.registry import BackendRegistry
from attn_shared.request import AttentionRequest
from attn_shared.selection import DecidedBy, Policy, Selection, Verdict, VerdictStatus

NOTHING = Inventory()
CHOSEN, ELIGIBLE = VerdictStatus.CHOSEN, VerdictStatus.ELIGIBLE
REJECTED, UNAVAILABLE = VerdictStatus.REJECTED, VerdictStatus.UNAVAILABLE
UNKNOWN = VerdictStatus.UNKNOWN


def able(name: str, **options: Any) -> Any:
    return backend(name, lambda device, known: capability(**options))


def choose(
    registry: BackendRegistry,
    policy: Policy | None = None,
    asked: AttentionRequest | None = None,
    *known: Any,
) -> Selection:
    return select(asked or request(), GPU, Inventory(known), policy, registry=registry)


def statuses(selection: Selection) -> dict[str, str]:
    return {verdict.name: str(verdict.status) for verdict in selection.verdicts}


def test_auto_takes_the_highest_rank_that_serves() -> None:
    registry = registry_of(
        able("NARROW", head_sizes=SizeSet.of(128)),
        able("GOOD", kv_layouts=(KVCacheLayout.HND,), preferred_block_size=32),
        able("LAST"),
    )
    found = choose(registry)
    assert (found.chosen, found.decided_by) == ("GOOD", DecidedBy.DEFAULT)
    assert found.backend_cls is registry.load("GOOD")
    assert (found.kv_layout, found.block_size) == (KVCacheLayout.HND, 32)
    assert statuses(found) == {"NARROW": "rejected", "GOOD": "chosen", "LAST": "eligible"}


def test_what_is_fixed_is_kept() -> None:
    both = able("X", kv_layouts=(KVCacheLayout.HND, KVCacheLayout.NHD))
    found = choose(registry_of(both), None, request(kv_layout="NHD", block_size=48))
    assert (found.kv_layout, found.block_size) == (KVCacheLayout.NHD, 48)


def test_a_slow_path_ranks_after_all_that_need_none() -> None:
    registry = registry_of(able("SLOW", sinks=Support.SLOW), able("FAST", sinks=Support.YES))
    assert choose(registry).chosen == "SLOW"
    assert choose(registry, None, request(has_sinks=True)).chosen == "FAST"
    alone = registry_of(able("SLOW", sinks=Support.SLOW), able("NEVER"))
    assert choose(alone, None, request(has_sinks=True)).chosen == "SLOW"


def test_measured_comes_before_the_default_order_and_only_where_it_serves() -> None:
    registry = registry_of(able("A"), able("B"), able("C", sinks=Support.YES))
    policy = Policy(measured=("GONE", "C", "B"))
    assert (choose(registry, policy).chosen, choose(registry, policy).decided_by) == (
        "C",
        DecidedBy.MEASURED,
    )
    assert choose(registry, Policy(measured=("GONE",))).decided_by is DecidedBy.DEFAULT
    found = choose(registry_of(able("A"), able("B")), policy)
    assert found.chosen == "B"


def test_a_backend_without_a_rank_is_taken_by_name_only() -> None:
    registry = registry_of(able("X"), able("QUIET"), ranks={"X": 1, "QUIET": None})
    assert choose(registry, Policy(measured=("QUIET",))).chosen == "X"
    found = choose(registry, Policy(backend="QUIET", source="a test"))
    assert (found.chosen, found.decided_by) == ("QUIET", DecidedBy.USER)
    assert statuses(found) == {"X": "eligible", "QUIET": "chosen"}
    with pytest.raises(NoBackendError):
        choose(registry_of(able("QUIET"), ranks={"QUIET": None}))


def test_the_model_overrules_the_user() -> None:
    registry = registry_of(able("A"), able("B"))
    found = choose(registry, Policy(required="B", backend="A", measured=("A",)))
    assert (found.chosen, found.decided_by) == ("B", DecidedBy.MODEL)
    assert "A was named by argument, and is overruled" in found.explain()


def test_a_named_backend_that_cannot_raises_with_reasons_and_alternatives() -> None:
    registry = registry_of(able("NARROW"), able("WIDE", sinks=Support.YES))
    with pytest.raises(BackendRejectedError) as caught:
        choose(registry, Policy(backend="NARROW"), request(has_sinks=True))
    assert str(caught.value) == (
        "backend NARROW, which was named, cannot serve this request on NVIDIA Fake (sm_90): "
        "sink=True (allowed: False). Hint: WIDE would serve it."
    )
    assert statuses(caught.value.selection) == {"NARROW": "rejected", "WIDE": "eligible"}  # type: ignore[arg-type]
    with pytest.raises(BackendRejectedError, match=r"NARROW, which the model requires, cannot"):
        choose(registry, Policy(required="NARROW"), request(has_sinks=True))
    with pytest.raises(BackendRejectedError, match=r"Hint: no other backend serves it either\."):
        choose(registry_of(able("NARROW")), Policy(backend="NARROW"), request(has_sinks=True))


def test_a_named_backend_without_its_library_raises_with_the_command() -> None:
    registry = registry_of(backend("X", vendor_libraries=("a",)), able("Y"))
    with pytest.raises(VendorMissingError) as caught:
        choose(registry, Policy(backend="X"), None, library("a", VendorStatus.ABSENT))
    assert str(caught.value) == (
        "backend X, which was named, cannot serve this request on NVIDIA Fake (sm_90): "
        "a is not installed; to install it: pip install a. Hint: Y would serve it."
    )
    assert caught.value.selection is not None
    assert caught.value.selection.verdict("X").status is UNAVAILABLE


def test_a_named_backend_that_waits_for_a_probe_says_who_probes() -> None:
    registry = registry_of(able("X", needs_probe=("a",)))
    with pytest.raises(
        BackendRejectedError, match=r"not known before a is probed\. Hint: Selector"
    ):
        choose(registry, Policy(backend="X"), None, library("a"))


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("FLASH_ATN", UnknownNameError, "unknown backend 'FLASH_ATN'; allowed: X. .*'FLASH_ATTN'"),
        ("flash_attn", UnknownNameError, "did you mean 'FLASH_ATTN', which no installed"),
        ("FLASHMLA", BackendNotProvidedError, "'FLASHMLA' is known and not provided"),
        ("", UnknownNameError, "unknown backend ''; allowed: X"),
    ],
)
def test_a_name_that_nobody_provides_is_never_taken_for_auto(
    name: str, error: type[AttnError], message: str
) -> None:
    with pytest.raises(error, match=message):
        choose(registry_of(able("X")), Policy(backend=name))


def test_nothing_that_serves_raises_with_every_verdict() -> None:
    registry = registry_of(
        able("NARROW"),
        backend("GONE", vendor_libraries=("a",)),
        able("LATE", sinks=Support.YES, needs_probe=("b",)),
        entry_points=[FakeEntryPoint("LOST", "no_such_module:X", "attn-lost", "0.1")],
    )
    known = (library("a", VendorStatus.ABSENT), library("b"))
    with pytest.raises(NoBackendError) as caught:
        choose(registry, None, request(has_sinks=True), *known)
    assert str(caught.value).split("\n") == [
        "no backend serves this request on NVIDIA Fake (sm_90):",
        "NARROW  rejected     sink=True (allowed: False)",
        "GONE    unavailable  a is not installed; to install it: pip install a",
        "LATE    unknown      not known before b is probed",
        (
            "LOST    unavailable  backend LOST failed to load: LOST = no_such_module:X "
            "(attn-lost 0.1): ModuleNotFoundError: No module named 'no_such_module'"
        ),
        "Hint: each line of a rejected one names the value and what is allowed.",
    ]
    selection = caught.value.selection
    assert selection is not None
    assert selection.chosen is None
    assert len(selection.failures) == 1


def test_a_platform_without_candidates_raises() -> None:
    with pytest.raises(NoBackendError, match="no backend serves this request on NVIDIA Fake"):
        choose(registry_of())


def test_a_device_without_its_platform_raises() -> None:
    with pytest.raises(PlatformMissingError, match="no installed platform serves cpu devices"):
        select(request(), CPU, NOTHING, registry=registry_of(able("X")))


def test_a_broken_plugin_is_shown_beside_the_choice() -> None:
    point = FakeEntryPoint("LOST", "no_such_module:X", "attn-lost", "0.1")
    found = choose(registry_of(able("X"), entry_points=[point]))
    assert statuses(found) == {"X": "chosen", "LOST": "unavailable"}
    assert "note: plugin failed: LOST = no_such_module:X (attn-lost 0.1): Module" in str(found)


def test_a_simulated_device_is_chosen_for_from_any_machine() -> None:
    waiting = backend(
        "X", lambda device, known: capability(needs_probe=("a",)), vendor_libraries=("a",)
    )
    assumed = Inventory((library("a", VendorStatus.ASSUMED),))
    found = select(request(), preset("h200"), assumed, registry=registry_of(waiting))
    assert found.chosen == "X"
    assert any("simulated" in note for note in found.notes())


def test_the_contender_is_who_would_win_if_all_turned_out_well() -> None:
    registry = registry_of(
        able("NARROW"),
        able("LATE", sinks=Support.YES, needs_probe=("a",)),
        able("GOOD", sinks=Support.YES),
    )

    def best(policy: Policy, **options: Any) -> Verdict | None:
        known = Inventory((library("a"),))
        return contender(request(**options), GPU, known, policy, registry)

    found = best(Policy(), has_sinks=True)
    assert found is not None
    assert (found.name, found.needs_probe) == ("LATE", ("a",))
    found = best(Policy())
    assert found is not None
    assert (found.name, found.needs_probe) == ("NARROW", ())
    found = best(Policy(backend="LATE"))
    assert found is not None
    assert found.needs_probe == ("a",)
    assert best(Policy(), has_alibi=True) is None


@dataclass(frozen=True)
class World:
    """Backends, libraries and a policy, drawn at random."""

    registry: BackendRegistry
    inventory: Inventory
    policy: Policy


NAMES = ["A", "B", "C", "D"]
FLAGS = {"has_sinks": "sinks", "has_alibi": "alibi", "needs_lse": "lse"}
supports = st.sampled_from(Support)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    names = draw(st.lists(st.sampled_from(NAMES), unique=True, min_size=1))
    classes = []
    for name in names:
        served = {field: draw(supports) for field in FLAGS.values()}
        if draw(st.booleans()):
            served["needs_probe"] = ("a",)
        libraries = draw(st.sampled_from([(), ("a",), ("a", "b")]))
        raises = draw(st.sampled_from([False, False, False, True]))
        classes.append(
            backend(
                name,
                _raising if raises else _serving(served),
                vendor_libraries=libraries,
            )
        )
    ranks = {name: draw(st.sampled_from([None, 100, 100, 200])) for name in names}
    known = [library(name, draw(st.sampled_from(VendorStatus))) for name in ("a", "b")]
    policy = Policy(
        backend=draw(st.sampled_from([None, None, *names])),
        measured=tuple(draw(st.lists(st.sampled_from(NAMES), max_size=2))),
    )
    return World(registry_of(*classes, ranks=ranks), Inventory(tuple(known)), policy)


def _serving(served: dict[str, Any]) -> Callable[..., Any]:
    return lambda device, known: capability(**served)


def _raising(device: Any, known: Any) -> Any:
    raise RuntimeError("a capability that raises")


requests = st.fixed_dictionaries({flag: st.booleans() for flag in FLAGS}).map(
    lambda flags: request(**flags)
)


def outcome(world: World, asked: AttentionRequest) -> Selection:
    """Select, taking the selection out of a refusal."""
    try:
        return select(asked, GPU, world.inventory, world.policy, registry=world.registry)
    except (NoBackendError, VendorMissingError) as refusal:
        if refusal.selection is None:
            raise
        return refusal.selection


@given(worlds(), requests)
@settings(max_examples=150)
def test_every_candidate_has_one_verdict_and_at_most_one_is_chosen(
    world: World, asked: AttentionRequest
) -> None:
    found = outcome(world, asked)
    assert sorted(v.name for v in found.verdicts) == list(world.registry.names())
    assert [v.name for v in found.verdicts if v.status is CHOSEN] == (
        [] if found.chosen is None else [found.chosen]
    )
    for verdict in found.verdicts:
        assert bool(verdict.reasons) is (verdict.status is REJECTED)
        assert bool(verdict.needs_probe) is (verdict.status is UNKNOWN)
        assert bool(verdict.detail) is (verdict.status in (UNAVAILABLE, UNKNOWN))


@given(worlds(), requests)
@settings(max_examples=150)
def test_a_named_backend_is_never_replaced(world: World, asked: AttentionRequest) -> None:
    found = outcome(world, asked)
    if world.policy.backend is None:
        return
    assert found.chosen in (None, world.policy.backend)
    assert found.decided_by is DecidedBy.USER
    if found.chosen is None:
        assert found.verdict(world.policy.backend).status is not ELIGIBLE


@given(worlds(), requests)
@settings(max_examples=150)
def test_auto_takes_the_best_of_those_that_serve(world: World, asked: AttentionRequest) -> None:
    found = outcome(world, asked)
    if world.policy.backend is not None:
        return
    serving = [v for v in found.verdicts if v.status in (CHOSEN, ELIGIBLE)]
    ranked = {v.name: v for v in serving if v.priority is not None}
    if found.chosen is None:
        assert not ranked
        return
    measured = [name for name in world.policy.measured if name in ranked]
    if measured:
        assert (found.chosen, found.decided_by) == (measured[0], DecidedBy.MEASURED)
        return
    chosen = ranked[found.chosen]
    assert chosen.priority is not None
    for other in ranked.values():
        assert other.priority is not None
        if bool(other.slow_features) == bool(chosen.slow_features):
            assert chosen.priority >= other.priority
        else:
            assert not chosen.slow_features


@given(worlds(), requests, st.sampled_from(sorted(FLAGS)))
@settings(max_examples=150)
def test_a_stricter_request_gains_no_candidate(
    world: World, asked: AttentionRequest, flag: str
) -> None:
    stricter = outcome(world, asked.with_options(**{flag: True}))
    serving = {v.name for v in outcome(world, asked).verdicts if v.status in (CHOSEN, ELIGIBLE)}
    still = {v.name for v in stricter.verdicts if v.status in (CHOSEN, ELIGIBLE)}
    assert still <= serving


@given(worlds(), requests)
@settings(max_examples=60)
def test_selecting_has_one_answer_and_leaves_no_trace(
    world: World, asked: AttentionRequest
) -> None:
    before = (pickle.dumps(world.inventory), world.registry.generation, set(sys.modules))
    first, second = outcome(world, asked), outcome(world, asked)
    assert first == second
    assert first.to_dict() == second.to_dict()
    assert (pickle.dumps(world.inventory), world.registry.generation) == before[:2]
    assert set(sys.modules) == before[2]


def test_selecting_imports_no_vendor(write_module: Callable[[str, str], None]) -> None:
    write_module("attn_fake_vendor", "raise RuntimeError('imported')")

    def load() -> None:
        importlib.import_module("attn_fake_vendor")

    registry = registry_of(backend("X", load=load, vendor_libraries=("a",)))
    assert choose(registry, None, None, library("a")).chosen == "X"
    assert "attn_fake_vendor" not in sys.modules


def test_a_question_is_answered_from_the_cache() -> None:
    asked: list[str] = []

    def served(device: Any, known: Any) -> Any:
        asked.append(device.name)
        return capability()

    registry, cache = registry_of(backend("X", served)), SelectionCache()
    first = cache.select(request(), GPU, NOTHING, Policy(), registry)
    assert cache.select(request(), GPU, NOTHING, Policy(), registry) is first
    assert len(asked) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"asked": request(block_size=32)},
        {"device": replace(GPU, index=1)},
        {"known": Inventory((library("a"),))},
        {"policy": Policy(backend="X")},
    ],
    ids=["request", "device", "inventory", "policy"],
)
def test_another_question_is_another_entry(change: dict[str, Any]) -> None:
    registry, cache = registry_of(able("X")), SelectionCache()
    first = cache.select(request(), GPU, NOTHING, Policy(), registry)
    second = cache.select(
        change.get("asked", request()),
        change.get("device", GPU),
        change.get("known", NOTHING),
        change.get("policy", Policy()),
        registry,
    )
    assert second is not first


def test_registering_anew_is_seen_at_once() -> None:
    registry, cache = registry_of(able("X")), SelectionCache()

    def chosen() -> Any:
        return cache.select(request(), GPU, NOTHING, Policy(), registry).backend_cls

    first, second = chosen(), able("X")
    assert chosen() is first
    registry.register("X", second)
    assert chosen() is second
    registry.register("BETTER", backend("BETTER", auto_priority=900))
    assert chosen().get_name() == "BETTER"
    registry.clear_override("BETTER")
    assert chosen() is second


def test_registries_do_not_share_entries() -> None:
    cache = SelectionCache()
    for _ in range(2):
        registry = registry_of(able("X"))
        found = cache.select(request(), GPU, NOTHING, Policy(), registry)
        assert found.backend_cls is registry.load("X")


def test_a_refusal_is_not_kept() -> None:
    registry, cache = registry_of(able("X")), SelectionCache()
    for _ in range(2):
        with pytest.raises(NoBackendError):
            cache.select(request(has_sinks=True), GPU, NOTHING, Policy(), registry)


def test_the_oldest_entry_makes_room() -> None:
    registry, cache = registry_of(able("X")), SelectionCache(max_entries=2)
    kept = {
        size: cache.select(request(block_size=size), GPU, NOTHING, Policy(), registry)
        for size in (16, 32, 48)
    }
    for size, is_kept in ((16, False), (32, True), (48, True)):
        found = cache.find(request(block_size=size), GPU, NOTHING, Policy(), registry)
        assert (found is kept[size]) is is_kept


class TestLibrariesOfThePolicy:
    """Opting into a vendor's library, and out of it."""

    def registry(self) -> BackendRegistry:
        def served(device: Any, known: Any) -> Any:
            return capability(sinks=Support.SLOW)

        slow = backend("VENDOR", served, vendor_libraries=("vendor",))
        return registry_of(able("PORTABLE", sinks=Support.YES), slow)

    def test_a_preferred_library_comes_first_where_its_backend_serves(self) -> None:
        here = (library("vendor"),)
        registry = self.registry()
        assert choose(registry, None, None, *here).chosen == "PORTABLE"
        found = choose(registry, Policy(prefer=("vendor",)), None, *here)
        assert (found.chosen, found.decided_by) == ("VENDOR", DecidedBy.PREFERENCE)
        assert "the policy prefers vendor" in found.explain()
        assert "preferred by the policy" in found.verdict("VENDOR").summary()
        assert found.runner_up() is not None

    def test_it_is_not_promoted_where_it_needs_a_slow_path_or_does_not_serve(self) -> None:
        here, policy = (library("vendor"),), Policy(prefer=("vendor",))
        registry = self.registry()
        found = choose(registry, policy, request(has_sinks=True), *here)
        assert (found.chosen, found.decided_by) == ("PORTABLE", DecidedBy.DEFAULT)
        torn = library("vendor", VendorStatus.BROKEN, error="torn")
        found = choose(registry, policy, None, torn)
        assert (found.chosen, found.decided_by) == ("PORTABLE", DecidedBy.DEFAULT)
        assert found.verdict("VENDOR").status is UNAVAILABLE

    def test_what_was_measured_decides_among_the_preferred(self) -> None:
        one, two = (
            backend(name, lambda device, known: capability(), vendor_libraries=("vendor",))
            for name in ("ONE", "TWO")
        )
        registry = registry_of(able("PORTABLE"), one, two)
        policy = Policy(prefer=("vendor",), measured=("PORTABLE", "TWO", "ONE"))
        found = choose(registry, policy, None, library("vendor"))
        assert (found.chosen, found.decided_by) == ("TWO", DecidedBy.PREFERENCE)

    def test_a_named_backend_wins_over_a_preference(self) -> None:
        policy = Policy(backend="PORTABLE", prefer=("vendor",))
        found = choose(self.registry(), policy, None, library("vendor"))
        assert (found.chosen, found.decided_by) == ("PORTABLE", DecidedBy.USER)

    def test_an_avoided_library_counts_as_not_there(self) -> None:
        registry = registry_of(
            backend("VENDOR", lambda d, k: capability(), vendor_libraries=("vendor",)),
            able("PORTABLE"),
        )
        here, policy = library("vendor", version="1.0"), Policy(avoid=("vendor",))
        assert choose(registry, None, None, here).chosen == "VENDOR"
        found = choose(registry, policy, None, here)
        assert found.chosen == "PORTABLE"
        assert found.verdict("VENDOR").detail == "vendor 1.0 is left aside: the policy avoids it"
        assert "the policy avoids vendor" in found.explain()
        with pytest.raises(VendorMissingError, match="the policy avoids it"):
            choose(registry, replace(policy, backend="VENDOR"), None, here)

    @pytest.mark.parametrize("policy", [Policy(prefer=("vendro",)), Policy(avoid=("vendro",))])
    def test_a_library_that_nobody_knows_is_an_error(self, policy: Policy) -> None:
        with pytest.raises(UnknownNameError, match="vendro"):
            choose(self.registry(), policy, None, library("vendor"))
