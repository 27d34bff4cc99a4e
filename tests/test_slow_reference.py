"""The bench refuses to time XPU_FLASH_ATTN where its library has no kernel for a call."""

from __future__ import annotations

import pytest
import torch

from attn_bench.slow_paths import SlowPathError, SlowPathGuard
from attn_conformance.rule import Depth
from attn_conformance.rules.catalogue import rules_named
from attn_conformance.stubs.modules import VendorStub, stub_vendor
from attn_conformance.stubs.suite import stubbed_subject
from attn_conformance.stubs.vendors.vllm_xpu_kernels import (
    VLLM_XPU_KERNELS,
    VLLM_XPU_KERNELS_UNCOMPILED,
)
from attn_shared.device import preset
from attn_xpu.backends.xpu_flash_attn import XpuFlashAttnBackend
from attn_xpu.platform import XpuPlatform


def run_one(stub: VendorStub, guard: SlowPathGuard) -> None:
    """Run a step by the stub under the bench's ear."""
    with stub_vendor(stub):
        specs = XpuPlatform().vendor_specs()
        subject = stubbed_subject(XpuFlashAttnBackend, preset("b60"), specs)
        (rule,) = rules_named(["causal"])
        case = rule.cases(Depth.QUICK, subject.capability)[0]
        torch.manual_seed(0)
        with guard.listen(XpuFlashAttnBackend.name):
            rule.check(subject, case)


def test_a_call_on_the_slow_reference_is_not_timed() -> None:
    with pytest.raises(SlowPathError, match="XPU_FLASH_ATTN is not timed"):
        run_one(VLLM_XPU_KERNELS_UNCOMPILED, SlowPathGuard())


def test_a_call_by_a_kernel_is() -> None:
    run_one(VLLM_XPU_KERNELS, SlowPathGuard())
