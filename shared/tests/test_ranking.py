"""Tables of default ranks."""

from __future__ import annotations

import pytest

from attn_shared.device import DeviceCapability, DeviceFacts, Fp8Format, Vendor
from attn_shared.errors import InvalidInputError
from attn_shared.ranking import Rank, check_vendor, rank
from attn_shared.request import AttentionRequest, Phase

HOPPER = DeviceFacts(
    vendor=Vendor.NVIDIA,
    name="NVIDIA H200",
    arch="sm_90",
    capability=DeviceCapability(vendor=Vendor.NVIDIA, major=9, minor=0),
    arch_family="hopper",
    fp8=Fp8Format.E4M3FN,
)


def request(phase: Phase = Phase.MIXED) -> AttentionRequest:
    return AttentionRequest(num_heads=8, num_kv_heads=2, head_size=64, phase=phase)


def names(table: list[Rank], phase: Phase = Phase.MIXED) -> list[tuple[str, int | None]]:
    return [(found.name, found.priority) for found in rank(table, request(phase), HOPPER)]


def test_candidates_come_best_rank_first_and_by_name_only_last() -> None:
    table = [
        Rank(name="NAMED", priority=None, provenance="by name"),
        Rank(name="LOW", priority=0, provenance="rule"),
        Rank(name="HIGH", priority=10, provenance="rule"),
    ]
    assert names(table) == [("HIGH", 10), ("LOW", 0), ("NAMED", None)]


def test_first_row_that_applies_counts() -> None:
    table = [
        Rank(name="A", priority=1, provenance="ampere", families=frozenset({"ampere"})),
        Rank(name="A", priority=2, provenance="decode", phases=frozenset({Phase.DECODE})),
        Rank(name="A", priority=3, provenance="elsewhere"),
    ]
    assert names(table) == [("A", 3)]
    assert names(table, Phase.DECODE) == [("A", 2)]


@pytest.mark.parametrize(
    ("limits", "is_offered"),
    [
        ({"archs": frozenset({"sm_90"})}, True),
        ({"archs": frozenset({"sm_9"})}, False),
        ({"families": frozenset({"hopper", "ada"})}, True),
        ({"families": frozenset({"blackwell"})}, False),
        ({"phases": frozenset({Phase.PREFILL})}, False),
        ({"phases": frozenset({Phase.MIXED, Phase.PREFILL})}, True),
    ],
)
def test_a_backend_without_a_row_for_the_device_or_phase_is_not_offered(
    limits: dict[str, frozenset[str]], is_offered: bool
) -> None:
    row = Rank(name="A", priority=1, provenance="rule", **limits)  # type: ignore[arg-type]
    assert bool(rank([row], request(), HOPPER)) is is_offered


def test_provenance_is_passed_on() -> None:
    table = [Rank(name="A", priority=1, provenance="measured on an abacus")]
    assert rank(table, request(), HOPPER)[0].provenance == "measured on an abacus"


def test_a_device_of_another_vendor_is_refused() -> None:
    check_vendor(HOPPER, Vendor.NVIDIA)
    with pytest.raises(InvalidInputError, match=r"NVIDIA H200 of vendor nvidia; allowed: .*amd"):
        check_vendor(HOPPER, Vendor.AMD)


def test_a_row_may_be_for_some_requests_alone() -> None:
    table = [
        Rank(name="A", priority=9, provenance="wide", fits=lambda asked: asked.head_size > 64),
        Rank(name="A", priority=1, provenance="narrow"),
    ]
    assert names(table) == [("A", 1)]
    wide = request().with_options(head_size=128)
    assert rank(table, wide, HOPPER)[0].priority == 9
