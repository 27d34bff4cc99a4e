"""FLASH_ATTN as selection sees it: every NVIDIA preset, and inputs that it has to refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fa_testing import TOKENSPEED, build_of, inventory, request

from attn_cuda._fa_capability import capability_diffkv, capability_on
from attn_cuda.backends.flash_attn import FlashAttnBackend
from attn_cuda.platform import CudaPlatform
from attn_shared.backend import AttentionBackend
from attn_shared.capability import Support
from attn_shared.device import PRESETS, DeviceFacts, Vendor, device_from_arch, preset
from attn_shared.errors import BackendRejectedError, VendorMissingError
from attn_shared.inventory import Inventory, VendorEntry, VendorStatus, assume_all
from attn_shared.selection import Policy, VerdictStatus
from attn_shared.selector import DEFAULT_SELECTOR, select

EVERYTHING = assume_all(CudaPlatform().vendor_specs())
NVIDIA = {name: facts for name, facts in PRESETS.items() if facts.vendor is Vendor.NVIDIA}
HOPPER, AMPERE = preset("h200"), preset("a100")


def words(device: DeviceFacts, found: Inventory, **fields: Any) -> str:
    reasons = capability_on(device, found).check(request(**fields), device)
    return "; ".join(map(str, reasons))


@pytest.mark.parametrize("name", NVIDIA)
def test_selection_for_every_nvidia_preset(name: str) -> None:
    device = NVIDIA[name]
    selection = DEFAULT_SELECTOR.resolve(request(), device)
    verdict = selection.verdict("FLASH_ATTN")
    if name == "t4":
        assert verdict.status is VerdictStatus.REJECTED
        assert "allowed: nvidia >= 8.0" in verdict.summary()
    else:
        assert verdict.status in (VerdictStatus.CHOSEN, VerdictStatus.ELIGIBLE)
        assert (verdict.block_size, str(verdict.kv_layout)) == (16, "NHD")


@pytest.mark.parametrize("name", NVIDIA)
@pytest.mark.parametrize("feature", ["has_sinks", "has_alibi", "batch_invariant", "needs_lse"])
def test_features_by_preset(name: str, feature: str) -> None:
    device = NVIDIA[name]
    capability = capability_on(device, EVERYTHING)
    major = 0 if device.capability is None else device.capability.major
    served = major >= 8 and (feature != "has_sinks" or major in (9, 10, 11))
    assert (capability.check(request(**{feature: True}), device) == ()) is served


def test_fp8_is_hoppers() -> None:
    for name, device in NVIDIA.items():
        capability = capability_on(device, EVERYTHING)
        assert ("fp8" in capability.kv_cache_dtypes) is (name in ("h100", "h200"))


def test_only_libraries_for_the_device_are_probed() -> None:
    names = ("flash_attn_3", "flash_attn", "flash_attn_4", "flashinfer")
    found = Inventory(tuple(VendorEntry(name=name, status=VendorStatus.PRESENT) for name in names))
    assert capability_on(AMPERE, found).needs_probe == ("flash_attn",)
    assert set(capability_on(HOPPER, found).needs_probe) == set(names[:3])
    assert capability_on(HOPPER, EVERYTHING).needs_probe == ()


# Bad input: the value, what is allowed, the library's own words, and what mends it.


def test_a_head_size_without_kernels() -> None:
    assert words(HOPPER, EVERYTHING, head_size=100) == (
        "head_size=100 (allowed: 8 to 256, a multiple of 8)"
    )


def test_a_block_that_is_no_multiple_of_16() -> None:
    assert words(HOPPER, EVERYTHING, block_size=24) == (
        "block_size=24 (allowed: a multiple of 16); leave it open to get 16"
    )


def test_fp8_on_ampere() -> None:
    assert words(AMPERE, EVERYTHING, kv_cache_dtype="fp8") == "kv_cache_dtype=fp8 (allowed: auto)"


def test_fp8_with_flash_attention_2_alone_names_the_library_to_install() -> None:
    absent = VendorEntry(
        name="flash_attn_3", status=VendorStatus.ABSENT, install="pip install tokenspeed-fa3"
    )
    found = Inventory((*inventory(vllm_flash_attn_2=build_of()).entries, absent))
    assert words(HOPPER, found, kv_cache_dtype="fp8") == (
        "kv_cache_dtype=fp8 (allowed: vllm_flash_attn_2: auto); flash_attn_3 is not installed; "
        "to install it: pip install tokenspeed-fa3"
    )


def test_an_architecture_that_is_not_compiled_in() -> None:
    absent = VendorEntry(
        name="flash_attn", status=VendorStatus.ABSENT, install="pip install flash-attn"
    )
    third = inventory(flash_attn_3=build_of(TOKENSPEED, "sinks"))
    found = Inventory((*third.entries, absent))
    assert words(device_from_arch("sm_120"), found, block_size=256) == (
        "flash_attn_build=sm_120 (allowed: flash_attn_3: 9.x); flash_attn is not installed; to "
        "install it: pip install flash-attn"
    )


def test_a_named_generation_that_cannot_serve_is_an_error() -> None:
    with pytest.raises(BackendRejectedError, match=r"flash_attn_version=4 .*flash_attn_4: alibi"):
        select(
            request(flash_attn_version=4, has_alibi=True),
            HOPPER,
            EVERYTHING,
            Policy(backend="FLASH_ATTN"),
            registry=DEFAULT_SELECTOR.registry,
        )


def test_a_named_generation_leaves_no_other_backend() -> None:
    selection = DEFAULT_SELECTOR.resolve(request(flash_attn_version=2), HOPPER)
    assert selection.chosen == "FLASH_ATTN"
    assert "flash_attn_version=2 (allowed: None)" in selection.verdict("TORCH_SDPA").summary()


def test_libraries_that_do_not_load_make_it_unavailable_in_their_own_words() -> None:
    undefined = "ImportError: _C.so: undefined symbol: _ZN3c104cuda9SetDeviceEa"
    names = FlashAttnBackend.vendor_libraries
    found = inventory(**dict.fromkeys(names, undefined))
    selection = select(request(), HOPPER, found, Policy(), registry=DEFAULT_SELECTOR.registry)
    verdict = selection.verdict("FLASH_ATTN")
    assert verdict.status is VerdictStatus.UNAVAILABLE
    assert undefined in verdict.detail
    assert "to install it again: pip install flash_attn_3" in verdict.detail


def test_a_named_backend_without_a_library_says_which_to_install() -> None:
    found = Inventory(
        tuple(
            VendorEntry(name=spec.name, status=VendorStatus.ABSENT, install=spec.install)
            for spec in CudaPlatform().vendor_specs()
        )
    )
    with pytest.raises(VendorMissingError, match="pip install tokenspeed-fa3"):
        select(
            request(),
            HOPPER,
            found,
            Policy(backend="FLASH_ATTN"),
            registry=DEFAULT_SELECTOR.registry,
        )


def test_the_preferred_block_is_what_the_installed_library_takes() -> None:
    found = inventory(flash_attn=build_of())
    capability = capability_on(AMPERE, found)
    assert capability.preferred_block_size == 256
    assert not capability.accepts_block_size(16)
    assert capability.check(request(block_size=None), AMPERE) == ()


def test_an_open_block_size_is_judged_as_the_preferred_one() -> None:
    found = inventory(flash_attn_3=build_of(TOKENSPEED, "sinks"), flash_attn=build_of())
    assert words(HOPPER, found, block_size=None, has_alibi=True).startswith("alibi=True")
    assert words(HOPPER, found, block_size=256, has_alibi=True) == ""


def test_widths_that_differ_have_a_name_of_their_own() -> None:
    capability = capability_diffkv(HOPPER, EVERYTHING)
    assert capability.check(request(head_size=64, head_size_v=128), HOPPER) == ()
    (refused,) = capability.check(request(), HOPPER)
    assert "FLASH_ATTN serves equal widths" in str(refused)


def test_the_class_and_its_views_agree() -> None:
    backend: type[AttentionBackend] = FlashAttnBackend
    assert backend.get_name() == "FLASH_ATTN"
    assert backend.capability(HOPPER, EVERYTHING).sinks is Support.YES
    assert backend.supports_dtype(torch.float16, HOPPER, EVERYTHING)
    assert not backend.supports_dtype(torch.float32, HOPPER, EVERYTHING)
