"""What AITER's backends admit and refuse, with the value, what is allowed, and what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from aiter_testing import MI300X, inventory, request

from attn_rocm._aiter_build import AITER_ARCHS, AiterBuild, build_in, missing_call
from attn_rocm._aiter_capability import decodes_by_pages, flash_capability, unified_capability
from attn_shared.capability import Capability
from attn_shared.device import PRESETS, Vendor, device_from_arch
from attn_shared.inventory import Inventory, VendorBuild, VendorEntry, VendorStatus
from attn_shared.request import AttentionType

ANY = inventory(None)
FLASH = flash_capability(MI300X, ANY)
UNIFIED = unified_capability(MI300X, ANY)


def told(capability: Capability, **fields: Any) -> list[str]:
    return [str(reason) for reason in capability.check(request(**fields), MI300X)]


@pytest.mark.parametrize("capability", [FLASH, UNIFIED], ids=["flash", "unified"])
@pytest.mark.parametrize("arch", ["gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201"])
def test_only_architectures_that_aiter_has_code_for(capability: Capability, arch: str) -> None:
    reasons = [reason.code for reason in capability.check(request(), device_from_arch(arch))]
    assert ("device" in reasons) == (arch not in AITER_ARCHS)


FP8 = "fp8 in decoders without window, sinks and LSE, of at most 16 query heads per kv head"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"block_size": 48}, "block_size=48 (allowed: "),
        ({"block_size": 64}, "block_size=64 (allowed: "),
        ({"head_size": 80}, "head_size=80 (allowed: 64, 128, 256)"),
        ({"dtype": torch.float32}, "dtype=float32 (allowed: "),
        ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype=fp8_e5m2 (allowed: "),
        ({"kv_cache_dtype": "fp8", "window": (7, 0)}, f"allowed: auto; {FP8}"),
        ({"kv_cache_dtype": "fp8", "has_sinks": True}, f"allowed: auto; {FP8}"),
        ({"kv_cache_dtype": "fp8", "num_kv_heads": 1}, f"allowed: auto; {FP8}"),
        ({"has_alibi": True, "has_sinks": True}, "alibi=True (allowed: False with sinks)"),
        ({"has_alibi": True, "softcap": 30.0}, "softcap=30.0 (allowed: None with ALiBi)"),
        ({"window": (0, 0)}, "window=(0, 0) (allowed: a left side of None or >= 1)"),
        ({"softcap": 30.0, "needs_lse": True}, "lse=True (allowed: False with softcap"),
        ({"use_mm_prefix": True}, "mm_prefix=True"),
    ],
)
def test_flash_refuses_with_the_values(fields: dict[str, Any], words: str) -> None:
    assert any(words in reason for reason in told(FLASH, **fields)), told(FLASH, **fields)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"block_size": 48}, "block_size=48 (allowed: 16, 32, 64, 128)"),
        ({"block_size": 256}, "block_size=256 (allowed: "),
        ({"head_size": 512}, "head_size=512 (allowed: "),
        ({"softcap": 30.0}, "softcap=30.0 (allowed: None)"),
        ({"non_causal": True}, "non_causal=True"),
        ({"needs_lse": True}, "lse=True"),
        ({"attn_type": AttentionType.ENCODER_ONLY, "block_size": None}, "attn_type=encoder_only"),
        ({"has_alibi": True, "has_sinks": True}, "alibi=True (allowed: False with sinks)"),
    ],
)
def test_unified_refuses_with_the_values(fields: dict[str, Any], words: str) -> None:
    assert any(words in reason for reason in told(UNIFIED, **fields)), told(UNIFIED, **fields)


@pytest.mark.parametrize("size", [16, 32])
def test_flash_serves_its_pages(size: int) -> None:
    assert told(FLASH, block_size=size) == []
    assert told(FLASH, block_size=size, kv_cache_dtype="fp8") == []


@pytest.mark.parametrize("size", [16, 32, 64, 128])
def test_unified_serves_its_tiles(size: int) -> None:
    assert told(UNIFIED, block_size=size, has_sinks=True, window=(127, 0)) == []


def probed(*arguments: str, window: str = "2", **flags: str) -> Inventory:
    calls = (
        *("flash_attn_varlen_func", "mha_batch_prefill_func"),
        *("paged_attention_v1", "unified_attention"),
    )
    named = {**dict.fromkeys(calls, "on"), "window_size": window, **flags}
    return inventory(
        VendorBuild(
            version="1.0",
            flags=tuple(sorted(named.items())),
            optional_arguments=frozenset(arguments),
        )
    )


def test_a_release_without_sinks_refuses_them() -> None:
    without = flash_capability(MI300X, probed())
    (reason,) = without.check(request(has_sinks=True), MI300X)
    assert str(reason).startswith("sink=True (allowed: False")
    both = ("flash_attn_varlen_func.sink_ptr", "mha_batch_prefill_func.sink_ptr")
    assert flash_capability(MI300X, probed(*both)).check(request(has_sinks=True), MI300X) == ()


def test_a_build_is_read_from_its_probe() -> None:
    arguments = ("mha_batch_prefill_func.block_table", "mha_batch_prefill_func.seqlen_k")
    assert build_in(probed(*arguments, window="3")) == AiterBuild(
        release="1.0", window_length=3, has_sinks=False, reads_tables=True
    )
    assert build_in(probed()).reads_tables is False


@pytest.mark.parametrize("word", ["off", "absent"])
def test_a_release_without_a_call_names_it_and_the_command(word: str) -> None:
    found = probed(paged_attention_v1=word)
    (reason,) = flash_capability(MI300X, found).check(request(), MI300X)
    assert "without paged_attention_v1" in str(reason)
    assert reason.hint == 'pip install -U "attn-rocm[aiter]"'
    assert unified_capability(MI300X, found).check(request(), MI300X) == ()
    assert missing_call(build_in(found), ("unified_attention",)) is None


def test_a_release_that_is_there_and_not_looked_into_asks_for_its_probe() -> None:
    present = Inventory((VendorEntry(name="aiter", status=VendorStatus.PRESENT, version="1.0"),))
    assert flash_capability(MI300X, present).needs_probe == ("aiter",)
    assert FLASH.needs_probe == ()


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, True),
        ({"num_heads": 16, "num_kv_heads": 1}, True),
        ({"num_heads": 17, "num_kv_heads": 1}, False),
        ({"window": (7, 0)}, False),
        ({"has_sinks": True}, False),
        ({"needs_lse": True}, False),
    ],
)
def test_which_layers_decode_by_pages(fields: dict[str, Any], expected: bool) -> None:
    assert decodes_by_pages(request(**fields)) is expected


@pytest.mark.parametrize("name", [n for n, d in PRESETS.items() if d.vendor is Vendor.AMD])
def test_each_preset_of_amd_gets_a_verdict(name: str) -> None:
    device = PRESETS[name]
    for capability in (FLASH, UNIFIED):
        reasons = capability.check(request(), device)
        assert [reason.code for reason in reasons] == [
            "device" for _ in range(device.arch not in AITER_ARCHS)
        ]
