"""The contract's rules through the stub of vllm-xpu-kernels, with and without compiled kernels."""

from __future__ import annotations

import pytest
from xpu_testing import failed_of, stubbed

from attn_conformance.stubs.vendors.vllm_xpu_kernels import (
    VLLM_XPU_KERNELS,
    VLLM_XPU_KERNELS_UNCOMPILED,
)
from attn_xpu._xpu_fa_slow import SlowReferenceWarning
from attn_xpu.backends.xpu_flash_attn import XpuFlashAttnBackend

SLOW_RULES = ("causal", "window", "sinks", "lse", "drafts", "keyless_rows", "encoder", "fp8_scales")


def test_the_kernels_keep_the_contract() -> None:
    with stubbed(VLLM_XPU_KERNELS, XpuFlashAttnBackend) as (recorder, subject):
        failed, passed = failed_of(subject)
    assert failed == {}
    assert passed > 300
    assert all(not call.positional for call in recorder.calls)


@pytest.mark.filterwarnings("ignore::attn_xpu._xpu_fa_slow.SlowReferenceWarning")
def test_the_slow_reference_keeps_the_contract_where_it_stands_in() -> None:
    with stubbed(VLLM_XPU_KERNELS_UNCOMPILED, XpuFlashAttnBackend) as (_, subject):
        failed, passed = failed_of(subject, SLOW_RULES)
    # It drops a window of one key, which is refused in its place.
    assert all("its reference drops such a window" in words for words in failed.values())
    assert set(failed) == {"window[window[extend-left-0]]", "window[window[mixed-left-0]]"}
    assert passed > 50


def test_the_slow_reference_is_told_each_time() -> None:
    with stubbed(VLLM_XPU_KERNELS_UNCOMPILED, XpuFlashAttnBackend) as (_, subject):
        for _ in range(2):
            with pytest.warns(SlowReferenceWarning, match="falls back to its slow reference"):
                failed_of(subject, ("causal",))
