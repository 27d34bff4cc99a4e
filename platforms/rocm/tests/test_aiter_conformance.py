"""The contract's rules through stubs of both releases, which compute what they were handed."""

from __future__ import annotations

import pytest
from aiter_testing import HEAD, MI300X, MI355X, WHEEL, stubbed

from attn_conformance.outcome import Status
from attn_conformance.stubs.suite import run_rules
from attn_conformance.subject import Subject
from attn_rocm.backends.rocm_aiter_fa import AiterFlashBackend
from attn_rocm.backends.rocm_aiter_unified_attn import AiterUnifiedBackend
from attn_shared.backend import AttentionBackend
from attn_shared.device import DeviceFacts

BACKENDS: dict[str, type[AttentionBackend]] = {
    "flash": AiterFlashBackend,
    "unified": AiterUnifiedBackend,
}

# What each backend calls, and the least number of cases that its whole suite has.
CALLS = {
    "flash": {"flash_attn_varlen_func", "mha_batch_prefill_func", "paged_attention_v1"},
    "unified": {"unified_attention"},
}
LEAST = 300


def failed_of(subject: Subject, rules: tuple[str, ...] = ()) -> tuple[dict[str, str], int]:
    """Return what failed, and how many cases passed."""
    outcomes = list(run_rules(subject, rules))
    passed = sum(outcome.status is Status.PASSED for outcome in outcomes)
    failed = {
        f"{item.rule} {item.case}": item.message
        for item in outcomes
        if item.status is Status.FAILED
    }
    return failed, passed


@pytest.mark.parametrize("release", [WHEEL, HEAD])
@pytest.mark.parametrize("backend", BACKENDS)
def test_each_release_keeps_the_whole_contract(backend: str, release: str) -> None:
    with stubbed(release, BACKENDS[backend]) as (recorder, subject):
        failed, passed = failed_of(subject)
    assert failed == {}
    assert passed > LEAST
    assert {call.function for call in recorder.calls} == CALLS[backend]
    assert not any(call.positional for call in recorder.calls)


@pytest.mark.parametrize("device", [MI300X, MI355X], ids=["fnuz", "fn"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_fp8_caches_have_the_devices_own_flavour(backend: str, device: DeviceFacts) -> None:
    rules = ("fp8_scales", "fp8_saturates", "fp8_flavours", "unsupported_option")
    with stubbed(WHEEL, BACKENDS[backend], device) as (recorder, subject):
        failed, passed = failed_of(subject, rules)
    assert failed == {}
    assert passed > 5
    names = {"flash": ("paged_attention_v1", "key_cache"), "unified": ("unified_attention", "k")}
    function, key = names[backend]
    stored = {call.arguments[key].dtype for call in recorder.of(function)}
    assert device.fp8_dtype in stored
