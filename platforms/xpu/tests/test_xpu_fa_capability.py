"""XPU_FLASH_ATTN as selection sees it: every Intel device, and inputs that it has to refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from xpu_testing import B60, request

from attn_shared.capability import Support
from attn_shared.device import DeviceFacts, device_from_arch, preset
from attn_shared.errors import BackendRejectedError, VendorMissingError
from attn_shared.foreign_names import backend_for, find_foreign_name
from attn_shared.inventory import Inventory, VendorEntry, VendorStatus, assume_all
from attn_shared.selection import Policy, VerdictStatus
from attn_shared.selector import DEFAULT_SELECTOR, select
from attn_xpu._xpu_fa_capability import ARCHS, LIBRARY, NAME, capability_on
from attn_xpu.backends.xpu_flash_attn import XpuFlashAttnBackend
from attn_xpu.platform import XpuPlatform

EVERYTHING = assume_all(XpuPlatform().vendor_specs())


def words(device: DeviceFacts = B60, **fields: Any) -> str:
    reasons = capability_on(device, EVERYTHING).check(request(**fields), device)
    return "; ".join(map(str, reasons))


def entry(status: VendorStatus, **fields: Any) -> Inventory:
    return EVERYTHING.with_entry(VendorEntry(name=LIBRARY, status=status, **fields))


def test_the_name_is_registered() -> None:
    assert DEFAULT_SELECTOR.registry.load(NAME) is XpuFlashAttnBackend


@pytest.mark.parametrize(("arch", "chosen"), [("bmg", NAME), ("lnl", NAME), ("ptl", NAME)])
def test_it_is_first_where_it_has_kernels(arch: str, chosen: str) -> None:
    selection = DEFAULT_SELECTOR.resolve(request(), device_from_arch(arch))
    assert selection.chosen == chosen
    assert (selection.block_size, str(selection.kv_layout)) == (64, "NHD")


@pytest.mark.parametrize("arch", ["pvc", "dg2", "mtl", "cri"])
def test_other_parts_of_intels_are_refused_by_architecture(arch: str) -> None:
    device = device_from_arch(arch)
    selection = DEFAULT_SELECTOR.resolve(request(), device)
    assert selection.chosen == "TRITON_ATTN"
    assert f"device=intel {arch} (allowed: intel {'/'.join(ARCHS)})" in (
        selection.verdict(NAME).summary()
    )


def test_an_architecture_in_no_table_is_no_crash_and_no_guess() -> None:
    device = device_from_arch("intel_gpu_xyz_g1")
    assert DEFAULT_SELECTOR.resolve(request(), device).verdict(NAME).status is (
        VerdictStatus.REJECTED
    )


@pytest.mark.parametrize(
    ("fields", "chosen"),
    [
        ({"softcap": 30.0}, "TRITON_ATTN"),
        ({"has_alibi": True}, "TRITON_ATTN"),
        ({"batch_invariant": True}, "TRITON_ATTN"),
        ({"use_mm_prefix": True}, "TRITON_ATTN"),
        ({"dtype": torch.float32}, "TRITON_ATTN"),
        ({"has_sinks": True, "window": (127, 0)}, NAME),
        ({"kv_cache_dtype": "fp8_e5m2"}, NAME),
        ({"head_size": 80}, NAME),
    ],
)
def test_what_its_kernels_lack_goes_to_triton(fields: dict[str, Any], chosen: str) -> None:
    assert DEFAULT_SELECTOR.resolve(request(**fields), B60).chosen == chosen


def test_only_a_library_that_is_present_and_unknown_is_probed() -> None:
    assert capability_on(B60, entry(VendorStatus.PRESENT)).needs_probe == (LIBRARY,)
    assert capability_on(B60, EVERYTHING).needs_probe == ()
    assert capability_on(B60, Inventory()).needs_probe == ()


@pytest.mark.parametrize("name", ["vllm:FLASH_ATTN", "sglang:intel_xpu"])
def test_it_has_other_names_elsewhere(name: str) -> None:
    foreign = find_foreign_name(name)
    assert backend_for(foreign, request(), B60.vendor) == NAME
    if name == "vllm:FLASH_ATTN":
        assert backend_for(foreign, request(), preset("h200").vendor) == "FLASH_ATTN"


# Bad input: the value, what is allowed, the library's own words, and what mends it.


def test_float32_has_no_kernel() -> None:
    assert words(dtype=torch.float32) == "dtype=float32 (allowed: bfloat16, float16)"


def test_a_page_of_24() -> None:
    assert words(block_size=24) == (
        "block_size=24 (allowed: a multiple of 16); leave it open to get 64"
    )


def test_pages_that_xe3_does_not_read() -> None:
    xe3 = device_from_arch("ptl")
    assert words(block_size=48) == words(xe3, block_size=128) == words(xe3, block_size=32) == ""
    assert words(xe3, block_size=48) == (
        "block_size=48 (allowed: 16, 32 or a multiple of 64 on ptl)"
    )


def test_a_head_size_past_the_kernels() -> None:
    assert words(head_size=520) == "head_size=520 (allowed: 8 to 512, a multiple of 8)"
    assert words(head_size=72, kv_cache_dtype="fp8") == (
        "head_size=72 (allowed: a multiple of 16 with an fp8 cache)"
    )


def test_what_no_kernel_returns_an_lse_for() -> None:
    xe3 = device_from_arch("ptl")
    assert words(needs_lse=True) == words(xe3, needs_lse=True, attn_type="encoder") == ""
    assert words(needs_lse=True, window=(3, 0)) == "lse=True (allowed: False with a window)"
    assert words(xe3, needs_lse=True) == "lse=True (allowed: False with a cache on ptl)"


def test_what_the_call_takes_and_the_kernel_drops_is_refused() -> None:
    assert words(softcap=30.0) == "softcap=30.0 (allowed: None)"
    assert words(has_alibi=True) == "alibi=True (allowed: False)"


def test_split_keys_make_no_batch_invariant_mode() -> None:
    assert words(batch_invariant=True) == "batch_invariance=True (allowed: False)"


def test_scales_per_head_are_refused() -> None:
    assert words(kv_cache_dtype="fp8", per_head_quant_scales=True) == (
        "per_head_quant_scales=True (allowed: False)"
    )


def test_a_generation_of_flash_attention_is_not_named_here() -> None:
    assert words(flash_attn_version=3) == "flash_attn_version=3 (allowed: None)"


def test_kernels_without_their_driver_are_unavailable_in_their_own_words() -> None:
    found = EVERYTHING.with_broken(LIBRARY, "ImportError: libze_loader.so.1: cannot open")
    selection = select(request(), B60, found, Policy(), registry=DEFAULT_SELECTOR.registry)
    verdict = selection.verdict(NAME)
    assert verdict.status is VerdictStatus.UNAVAILABLE
    assert "libze_loader.so.1: cannot open" in verdict.detail
    assert selection.chosen == "TRITON_ATTN"


def test_a_named_backend_without_its_library_says_what_to_install() -> None:
    found = entry(VendorStatus.ABSENT, install='pip install "attn-xpu[kernels]"')
    with pytest.raises(VendorMissingError, match=r'pip install "attn-xpu\[kernels\]"'):
        select(request(), B60, found, Policy(backend=NAME), registry=DEFAULT_SELECTOR.registry)


def test_a_named_backend_refuses_with_all_reasons() -> None:
    asked = request(dtype=torch.float32, block_size=24, softcap=2.0)
    with pytest.raises(BackendRejectedError) as caught:
        select(asked, B60, EVERYTHING, Policy(backend=NAME), registry=DEFAULT_SELECTOR.registry)
    for text in ("dtype=float32", "block_size=24", "softcap=2.0", "TRITON_ATTN"):
        assert text in str(caught.value)


def test_the_class_and_its_views_agree() -> None:
    assert XpuFlashAttnBackend.get_name() == NAME
    assert XpuFlashAttnBackend.capability(B60, EVERYTHING).sinks is Support.YES
    assert XpuFlashAttnBackend.supports_dtype(torch.float16, B60, EVERYTHING)
    assert not XpuFlashAttnBackend.supports_dtype(torch.float32, B60, EVERYTHING)
