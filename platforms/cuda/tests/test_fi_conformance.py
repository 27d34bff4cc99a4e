"""The contract's rules through FlashInfer's stubs, which have the real wheels' signatures.

The release that runs on the machine of the figures goes through all of them.
"""

from __future__ import annotations

import pytest
from fi_testing import B200, H200, RELEASES, fi_stubbed

from attn_conformance.outcome import Status
from attn_conformance.stubs.suite import run_rules
from attn_conformance.subject import Subject
from attn_cuda.backends.flashinfer_trtllm import FlashInferTrtllmBackend
from attn_shared.device import DeviceFacts

SOME = (
    "causal",
    "window",
    "lse",
    "softcap",
    "cascade",
    "layouts",
    "fp8_scales",
    "capture_pointers",
)


def failed_of(subject: Subject, rules: tuple[str, ...]) -> tuple[dict[str, str], int]:
    """Return what failed, and how many cases passed."""
    outcomes = list(run_rules(subject, rules))
    passed = sum(outcome.status is Status.PASSED for outcome in outcomes)
    failed = {item.name: item.message for item in outcomes if item.status is Status.FAILED}
    return failed, passed


@pytest.mark.parametrize(
    ("release", "device", "rules", "least"),
    [("0.6.13", H200, (), 150), ("0.7.4", H200, SOME, 20), ("0.7.4", B200, SOME, 20)],
    ids=["0.6.13", "0.7.4", "blackwell"],
)
def test_each_release_keeps_the_contract(
    release: str, device: DeviceFacts, rules: tuple[str, ...], least: int
) -> None:
    assert release in RELEASES
    with fi_stubbed(release, device) as (recorder, subject):
        failed, passed = failed_of(subject, rules)
    assert failed == {}
    assert passed > least
    planned = [call for call in recorder.calls if call.function.endswith((".plan", ".run"))]
    assert planned
    assert all(not call.positional for call in planned)
    called = {call.function.split(".")[0] for call in planned}
    assert called >= {
        "BatchDecodeWithPagedKVCacheWrapper",
        "BatchPrefillWithPagedKVCacheWrapper",
        "MultiLevelCascadeAttentionWrapper",
    }


@pytest.mark.parametrize(
    ("release", "device", "least"),
    [("0.6.13", H200, 280), ("0.7.4", B200, 320)],
    ids=["hopper", "blackwell"],
)
def test_trtllm_keeps_the_contract(release: str, device: DeviceFacts, least: int) -> None:
    with fi_stubbed(release, device, FlashInferTrtllmBackend) as (recorder, subject):
        failed, passed = failed_of(subject, ())
    assert failed == {}
    assert passed > least
    direct = [call for call in recorder.calls if call.function.startswith("trtllm")]
    assert all(not call.positional for call in direct)
    called = {call.function for call in direct}
    both = {"trtllm_batch_context_with_kv_cache", "trtllm_batch_decode_with_kv_cache"}
    assert called == (both if device is B200 else both - {"trtllm_batch_context_with_kv_cache"})
