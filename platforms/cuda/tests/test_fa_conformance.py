"""The contract's rules through each library's stub, which has the real wheel's signature.

One library goes through all of them; the others through those whose arguments, lengths, layouts or
corrections are their own.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fa_testing import H200, STUBS, request, stubbed

from attn_conformance.outcome import Status
from attn_conformance.stubs.recorder import Recorder
from attn_conformance.stubs.suite import run_rules
from attn_conformance.stubs.vendors.flash_attn_3 import FLASH_ATTN_3_PYTHON
from attn_conformance.stubs.vendors.vllm_flash_attn import VLLM_FLASH_ATTN_3_FUNCTION
from attn_conformance.subject import Subject
from attn_cuda.backends.flash_attn import FlashAttnBackend
from attn_shared.device import preset

MASKS = ("causal", "window", "two_sided_window", "non_causal", "unread_query_rows", "order")
TYPES = ("encoder", "encoder_only", "cross_attention", "keyless_rows", "empty_batch")
LOGITS = ("softcap", "alibi", "sinks", "lse", "scale", "value_head_sizes", "layouts")
LENGTHS = ("padded_requests", "queryless_requests", "drafts", "upper_bounds")
STEPS = ("batch_invariance", "cascade", "capture_pointers", "replay", "update_block_table")
TENSORS = ("output_in_place", "output_none", "strided_inputs", "padded_blocks")
FP8 = ("fp8_scales", "fp8_saturates", "fp8_scales_per_head", "fp8_flavours")
GATES = ("construction", "unsupported_option")
OWN = (*MASKS, *TYPES, *LOGITS, *LENGTHS, *STEPS, *TENSORS, *FP8, *GATES)

# Pages of 256 tokens make every case long.
LONG_PAGES = ("causal", "alibi", "softcap", "padded_requests", "queryless_requests", "encoder")

RULES: dict[str, tuple[str, ...]] = {
    "flash_attn_3": (),
    "vllm_flash_attn_3": OWN,
    "vllm_flash_attn_2": (*MASKS, *TYPES, *LOGITS, *LENGTHS, *STEPS, *TENSORS),
    "flash_attn_4": (*MASKS, *TYPES, *LOGITS, *TENSORS, "cascade"),
    "flash_attn": (*LONG_PAGES, "capture_pointers"),
}


def failed_of(subject: Subject, rules: tuple[str, ...]) -> tuple[dict[str, str], int]:
    """Return what failed, and how many cases passed."""
    outcomes = list(run_rules(subject, rules))
    passed = sum(outcome.status is Status.PASSED for outcome in outcomes)
    failed = {item.name: item.message for item in outcomes if item.status is Status.FAILED}
    return failed, passed


@pytest.mark.parametrize("name", RULES)
def test_each_library_keeps_the_contract(name: str) -> None:
    with stubbed(name) as (recorder, subject):
        failed, passed = failed_of(subject, RULES[name])
    assert failed == {}
    assert passed > 20
    by_position = {call.function for call in recorder.calls if call.positional}
    assert by_position == ({"fwd"} if name == "vllm_flash_attn_3" else set())
    assert {call.function for call in recorder.calls} >= EXPECTED_CALLS[name]


EXPECTED_CALLS = {
    "flash_attn_3": {"fwd", "get_scheduler_metadata"},
    "vllm_flash_attn_3": {"fwd", "get_scheduler_metadata"},
    "vllm_flash_attn_2": {"flash_attn_varlen_func"},
    "flash_attn_4": {"flash_attn_varlen_func"},
    "flash_attn": {"flash_attn_varlen_func"},
}


@pytest.fixture
def functions_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Recorder, Subject]]:
    monkeypatch.setitem(STUBS, "flash_attn_3", FLASH_ATTN_3_PYTHON)
    with stubbed("flash_attn_3") as found:
        yield found


def test_vllms_flash_attention_3_by_its_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STUBS, "vllm_flash_attn_3", VLLM_FLASH_ATTN_3_FUNCTION)
    rules = ("causal", "window", "sinks", "lse", "encoder", "softcap", "output_in_place")
    with stubbed("vllm_flash_attn_3") as (recorder, subject):
        failed, _ = failed_of(subject, (*rules, "fp8_scales"))
    assert failed == {}
    called = {call.function for call in recorder.calls}
    assert called == {"flash_attn_varlen_func", "get_scheduler_metadata"}


def test_flash_attention_3_by_its_python_functions(
    functions_alone: tuple[Recorder, Subject],
) -> None:
    recorder, subject = functions_alone
    rules = ("causal", "window", "sinks", "lse", "encoder", "cascade", "output_in_place")
    failed, _ = failed_of(subject, (*rules, "fp8_scales"))
    assert failed == {}
    called = {call.function for call in recorder.calls}
    assert called >= {"flash_attn_with_kvcache", "flash_attn_varlen_func"}


def test_a_build_without_pages_serves_encoders_and_refuses_the_rest_before_a_kernel() -> None:
    with stubbed("fa3_fwd") as (recorder, subject):
        failed, passed = failed_of(subject, (*TYPES, "causal", "construction"))
        assert failed == {}
        assert passed > 5
        assert {call.function for call in recorder.calls} == {"flash_attn_varlen_func"}
        reasons = subject.capability.check(request(), H200)
    assert "no paged keys and values (FLASHATTENTION_DISABLE_PAGEDKV)" in str(reasons[0])
    assert "pip install tokenspeed-fa3" in reasons[0].hint


def test_flash_attention_2_on_ampere() -> None:
    with stubbed("vllm_flash_attn_2", preset("a100")) as (_, subject):
        failed, passed = failed_of(subject, ("causal", "construction", "unsupported_option"))
    assert failed == {}
    assert passed > 20


def test_a_stub_of_each_library_is_found_by_its_own_name() -> None:
    for name in STUBS:
        with stubbed(name) as (_, subject):
            usable = [
                item for item in FlashAttnBackend.vendor_libraries if _is_usable(subject, item)
            ]
        assert usable == [name]


def _is_usable(subject: Subject, name: str) -> bool:
    return subject.inventory.get(name).is_usable
