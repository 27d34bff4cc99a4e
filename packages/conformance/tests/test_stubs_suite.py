"""Backends over vendors that are not here: the suite passes them, and catches a wrong argument."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from stubbed_backends import FlashAttn3, FlashInfer, LseInBits, WindowOfW

from attn_conformance.outcome import Status
from attn_conformance.reference_backend import ReferenceBackend
from attn_conformance.stubs.modules import stub_vendor
from attn_conformance.stubs.recorder import Recorder
from attn_conformance.stubs.suite import run_rules, stubbed_subject
from attn_conformance.stubs.vendors.flash_attn_3 import FLASH_ATTN_3
from attn_conformance.stubs.vendors.flashinfer import FLASHINFER
from attn_shared.device import preset
from attn_shared.inventory import VendorStatus

H200 = preset("h200")
MASKS = ("causal", "extend", "window", "page_tables", "layouts", "unread_query_rows")
ROWS = ("padded_requests", "queryless_requests", "drafts", "many_requests", "upper_bounds")
NUMBERS = ("scale", "gqa", "dtypes", "lse", "merged_halves")


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    with stub_vendor(FLASH_ATTN_3, FLASHINFER) as recorder:
        yield recorder


def failures(backend: type[ReferenceBackend], *rules: str) -> dict[str, str]:
    outcomes = list(run_rules(stubbed_subject(backend, H200), rules))
    assert any(outcome.status is not Status.EXCLUDED for outcome in outcomes)
    return {item.name: item.message for item in outcomes if item.status is Status.FAILED}


@pytest.mark.parametrize("backend", [FlashAttn3, FlashInfer], ids=lambda backend: backend.name)
@pytest.mark.parametrize("rules", [MASKS, ROWS, NUMBERS], ids=["masks", "rows", "numbers"])
def test_a_right_wrapper_passes(
    backend: type[ReferenceBackend], rules: tuple[str, ...], recorder: Recorder
) -> None:
    assert failures(backend, *rules) == {}
    assert all(not call.positional for call in recorder.of("flash_attn_with_kvcache"))


def test_sinks_reach_the_kernel(recorder: Recorder) -> None:
    assert failures(FlashAttn3, "sinks") == {}
    assert all(call.arguments["sinks"] is not None for call in recorder.calls)


def test_a_window_of_w_keys_is_caught(recorder: Recorder) -> None:
    failed = failures(WindowOfW, "causal", "window")

    assert failed
    assert all(name.startswith("window[") for name in failed)
    assert {call.arguments["window_size"] for call in recorder.calls} > {(1, 0), (3, 0)}


def test_an_lse_in_bits_is_caught(recorder: Recorder) -> None:
    failed = failures(LseInBits, "causal", "lse")

    assert failed
    assert all("LSE at" in message for message in failed.values())


def test_a_subject_is_told_of_a_device_and_of_what_is_installed(recorder: Recorder) -> None:
    subject = stubbed_subject(FlashAttn3, H200)

    entry = subject.inventory.get("flash_attn_3")
    assert subject.facts.arch == "sm_90"
    assert subject.device.type == "cpu"
    assert entry.status is VendorStatus.LOADED
    assert entry.version == "3.0.0.post20260810"
