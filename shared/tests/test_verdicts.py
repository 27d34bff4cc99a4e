from __future__ import annotations

from typing import Any

import pytest
from attn_shared_fakes import (
    GPU,
    FakeEntryPoint,
    backend,
    capability,
    library,
    registry_of,
    request,
)

from attn_shared.capability import Support
from attn_shared.device import Vendor
from attn_shared.dtypes import KVCacheLayout
from attn_shared.errors import UnknownNameError
from attn_shared.inventory import Inventory, VendorStatus
from attn_shared.limits import DeviceLimit
from attn_shared.platform import Candidate
from attn_shared.registry import BackendRegistry
from attn_shared.request import AttentionRequest, AttentionType
from attn_shared.selection import Policy, Verdict, VerdictStatus
from attn_shared.verdicts import candidates_for, judge

ABSENT, PRESENT, LOADED = VendorStatus.ABSENT, VendorStatus.PRESENT, VendorStatus.LOADED
BROKEN, ASSUMED = VendorStatus.BROKEN, VendorStatus.ASSUMED


def candidates(registry: BackendRegistry, policy: Policy | None = None) -> list[Candidate]:
    platform = registry.platform_for(Vendor.NVIDIA)
    return candidates_for(platform, request(), GPU, policy or Policy(), registry)


def ranks(registry: BackendRegistry, policy: Policy | None = None) -> list[tuple[str, int | None]]:
    return [(found.name, found.priority) for found in candidates(registry, policy)]


def verdict_on(
    registry: BackendRegistry,
    asked: AttentionRequest | None = None,
    *known: Any,
    name: str = "X",
) -> Verdict:
    candidate = Candidate(name=name, priority=100, provenance="a rule")
    return judge(candidate, asked or request(), GPU, Inventory(known), registry)


def test_candidates_come_best_rank_first_and_equals_in_the_platforms_order() -> None:
    order = {"LOW": 1, "TIE_A": 50, "BY_NAME": None, "NEGATIVE": -5, "TIE_B": 50, "HIGH": 300}
    registry = registry_of(*(backend(name) for name in order), ranks=order)
    assert ranks(registry) == [
        ("HIGH", 300),
        ("TIE_A", 50),
        ("TIE_B", 50),
        ("LOW", 1),
        ("NEGATIVE", -5),
        ("BY_NAME", None),
    ]


def test_a_third_partys_backend_ranks_itself() -> None:
    registry = registry_of(
        backend("FIRST"),
        backend("MINE", auto_priority=150),
        backend("THEIRS"),
        ranks={"FIRST": 100},
    )
    assert ranks(registry) == [("MINE", 150), ("FIRST", 100), ("THEIRS", None)]
    assert candidates(registry)[0].provenance == "declared by register_backend"


def test_the_platforms_rank_counts_where_it_has_one() -> None:
    registry = registry_of(backend("X", auto_priority=900), ranks={"X": 7})
    assert ranks(registry) == [("X", 7)]


def test_an_override_of_a_ranked_backend_is_said() -> None:
    (found,) = candidates(registry_of(backend("X"), ranks={"X": 7}))
    assert found.provenance == "a rule; overridden by attn_shared_fakes:X"


def test_a_third_party_that_fails_has_no_rank_and_takes_nobody_down() -> None:
    registry = registry_of(
        backend("GOOD"),
        entry_points=[
            FakeEntryPoint("LOST", "no_such_module:X", "attn-lost", "0.1"),
            FakeEntryPoint("TWICE", "a:X", "attn-a"),
            FakeEntryPoint("TWICE", "b:X", "attn-b"),
        ],
    )
    assert ranks(registry) == [("GOOD", 100), ("LOST", None), ("TWICE", None)]
    lost, twice = (verdict_on(registry, name=name) for name in ("LOST", "TWICE"))
    assert lost.status is twice.status is VerdictStatus.UNAVAILABLE
    assert lost.detail == (
        "backend LOST failed to load: LOST = no_such_module:X (attn-lost 0.1): "
        "ModuleNotFoundError: No module named 'no_such_module'"
    )
    assert twice.detail == "backend TWICE is provided by attn-a 1.0 (a:X) and attn-b 1.0 (b:X)."


def test_a_named_backend_is_a_candidate_wherever_it_comes_from() -> None:
    point = FakeEntryPoint("ROCM_ATTN", "attn_shared_fakes:FakeBackend", "attn-rocm", "0.1")
    registry = registry_of(backend("X"), entry_points=[point])
    assert ranks(registry) == [("X", 100)]
    assert ranks(registry, Policy(backend="ROCM_ATTN")) == [("X", 100), ("ROCM_ATTN", None)]
    found = candidates(registry, Policy(required="ROCM_ATTN"))[-1]
    assert found.provenance == "of attn-rocm 0.1, which platform fake does not rank"
    assert ranks(registry, Policy(backend="X")) == [("X", 100)]


def test_a_name_that_nobody_provides_is_refused() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown backend 'Y'; allowed: X\."):
        candidates(registry_of(backend("X")), Policy(backend="Y"))


def test_an_able_backend_is_eligible_with_what_its_cache_gets() -> None:
    able = backend(
        "X",
        lambda device, known: capability(
            kv_layouts=(KVCacheLayout.HND, KVCacheLayout.NHD),
            preferred_block_size=64,
            sinks=Support.SLOW,
        ),
    )
    found = verdict_on(registry_of(able), request(has_sinks=True))
    assert found.status is VerdictStatus.ELIGIBLE
    assert (found.kv_layout, found.block_size) == (KVCacheLayout.HND, 64)
    assert found.slow_features == ("sink",)
    assert (found.priority, found.provenance) == (100, "a rule")
    found = verdict_on(registry_of(able), request(kv_layout="NHD", block_size=32))
    assert (found.kv_layout, found.block_size) == (KVCacheLayout.NHD, 32)
    assert found.slow_features == ()


def test_an_encoder_gets_no_cache() -> None:
    able = backend(
        "X",
        lambda device, known: capability(
            attn_types=frozenset({AttentionType.ENCODER_ONLY}), block_sizes=(), kv_layouts=()
        ),
    )
    found = verdict_on(registry_of(able), request(attn_type="encoder_only"))
    assert found.status is VerdictStatus.ELIGIBLE
    assert (found.kv_layout, found.block_size) == (None, None)


def test_a_backend_that_cannot_is_rejected_with_all_reasons() -> None:
    found = verdict_on(registry_of(backend("X")), request(head_size=20, has_sinks=True))
    assert found.status is VerdictStatus.REJECTED
    assert [reason.code for reason in found.reasons] == ["head_size", "sink"]
    assert (found.kv_layout, found.block_size) == (None, None)


@pytest.mark.parametrize(
    ("known", "detail"),
    [
        ([], "a is a library that no installed platform package declares"),
        ([library("a", ABSENT)], "a is not installed; to install it: pip install a"),
        (
            [library("a", BROKEN, version="2.1", error="OSError: libcudart.so.12")],
            ("a 2.1 failed to load: OSError: libcudart.so.12; to install it again: pip install a"),
        ),
    ],
)
def test_a_backend_without_its_library_is_unavailable_in_the_librarys_words(
    known: list[Any], detail: str
) -> None:
    registry = registry_of(backend("X", vendor_libraries=("a",)))
    found = verdict_on(registry, request(), *known)
    assert (found.status, found.detail) == (VerdictStatus.UNAVAILABLE, detail)


@pytest.mark.parametrize("status", [PRESENT, LOADED, ASSUMED])
def test_any_one_usable_library_is_enough(status: VendorStatus) -> None:
    registry = registry_of(backend("X", vendor_libraries=("a", "b")))
    gone = library("a", BROKEN, error="OSError: no")
    found = verdict_on(registry, request(), gone, library("b", status))
    assert found.status is VerdictStatus.ELIGIBLE
    found = verdict_on(registry, request(), gone, library("b", ABSENT))
    assert found.status is VerdictStatus.UNAVAILABLE
    assert found.detail.startswith("a failed to load: OSError: no")
    assert found.detail.endswith("; b is not installed; to install it: pip install b")


def test_a_backend_may_be_broken_itself() -> None:
    broken = Inventory().with_broken("X", RuntimeError("no compiler"))
    found = verdict_on(registry_of(backend("X")), request(), *broken.entries)
    assert found.status is VerdictStatus.UNAVAILABLE
    assert found.detail == "X failed to load: RuntimeError: no compiler"


@pytest.mark.parametrize(
    ("served", "words"),
    [
        (lambda device, known: 1 / 0, "ZeroDivisionError: division by zero"),
        (lambda device, known: None, "AttributeError: 'NoneType' object has no attribute 'check'"),
        (lambda device, known: capability(block_sizes=(0,)), "ZeroDivisionError: "),
        (lambda device, known: capability(kv_layouts=()), "IndexError: tuple index out of range"),
    ],
)
def test_a_capability_that_raises_is_its_own_affair(served: Any, words: str) -> None:
    found = verdict_on(registry_of(backend("X", served)), request(block_size=16))
    assert found.status is VerdictStatus.UNAVAILABLE
    assert found.detail.startswith(f"its capability raised {words}")


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (PRESENT, VerdictStatus.UNKNOWN),
        (LOADED, VerdictStatus.ELIGIBLE),
        (ASSUMED, VerdictStatus.ELIGIBLE),
    ],
)
def test_an_answer_waits_for_what_is_installed_and_not_loaded(
    status: VendorStatus, expected: VerdictStatus
) -> None:
    waiting = backend(
        "X", lambda device, known: capability(needs_probe=("a",)), vendor_libraries=("a",)
    )
    registry = registry_of(waiting)
    found = verdict_on(registry, request(), library("a", status))
    assert found.status is expected
    is_unknown = expected is VerdictStatus.UNKNOWN
    assert found.needs_probe == (("a",) if is_unknown else ())
    assert found.detail == ("not known before a is probed" if is_unknown else "")


def test_what_is_rejected_anyway_waits_for_nothing() -> None:
    waiting = backend("X", lambda device, known: capability(needs_probe=("a", "b")))
    entries = (library("a"), library("b"))
    found = verdict_on(registry_of(waiting), request(has_sinks=True), *entries)
    assert (found.status, found.needs_probe) == (VerdictStatus.REJECTED, ())
    found = verdict_on(registry_of(waiting), request(), *entries)
    assert found.detail == "not known before a and b are probed"


class TestDeviceBeforeLibrary:
    """A library that is missing is no reason where the device is one already."""

    def told(self, served: Any, *known: Any) -> Verdict:
        registry = registry_of(backend("X", served, vendor_libraries=("lib",)))
        return verdict_on(registry, None, *known)

    def test_a_device_that_it_does_not_run_on_is_said(self) -> None:
        elsewhere = capability(devices=(DeviceLimit(vendor=Vendor.AMD),))
        found = self.told(lambda device, inventory: elsewhere, library("lib", ABSENT))
        assert found.status is VerdictStatus.REJECTED
        assert [reason.code for reason in found.reasons] == ["device"]

    def test_the_library_is_said_where_the_device_would_do(self) -> None:
        found = self.told(lambda device, inventory: capability(), library("lib", ABSENT))
        assert found.status is VerdictStatus.UNAVAILABLE
        assert "pip install lib" in found.detail

    def test_a_capability_that_raises_without_its_library_leaves_that_to_be_said(self) -> None:
        found = self.told(lambda device, inventory: 1 // 0, library("lib", ABSENT))
        assert found.status is VerdictStatus.UNAVAILABLE
        assert "pip install lib" in found.detail
