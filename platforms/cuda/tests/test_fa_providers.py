"""Which FlashAttention runs what: by device, by build, by name, and beside recorded decisions."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from fa_testing import TOKENSPEED, build_of, inventory, request

from attn_cuda._fa_providers import (
    LIBRARIES,
    Provider,
    libraries_for,
    page_multiple,
    resolve_provider,
)
from attn_shared.capability import Reason
from attn_shared.device import device_from_arch
from attn_shared.inventory import Inventory, VendorBuild, VendorEntry, VendorStatus
from attn_shared.request import AttentionType

EVERYTHING = inventory(**dict.fromkeys(LIBRARIES))
NO_PAGES = {"pagedkv": "off", "local": "off", "fp16": "off"}


def provider(arch: str, found: Inventory = EVERYTHING, **fields: Any) -> Provider | None:
    return resolve_provider(device_from_arch(arch), found, request(**fields)).provider


def library(arch: str, found: Inventory = EVERYTHING, **fields: Any) -> str | None:
    resolved = provider(arch, found, **fields)
    return None if resolved is None else resolved.library


def reason(arch: str, found: Inventory, **fields: Any) -> Reason:
    resolution = resolve_provider(device_from_arch(arch), found, request(**fields))
    assert resolution.provider is None
    assert resolution.reason is not None
    return resolution.reason


@pytest.mark.parametrize(
    ("arch", "version"),
    [
        *(("8.0", 2), ("8.6", 2), ("8.9", 2), ("9.0", 3), ("10.0", 4), ("10.3", 4)),
        *(("11.0", 2), ("12.0", 2), ("12.1", 2), ("7.5", None)),
    ],
)
def test_a_generation_for_each_architecture(arch: str, version: int | None) -> None:
    resolved = provider(arch)
    assert (None if resolved is None else resolved.version) == version


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "vllm_flash_attn_3"),
        ({"has_alibi": True}, "vllm_flash_attn_2"),
        ({"has_alibi": True, "has_sinks": True}, None),
        ({"has_sinks": True}, "vllm_flash_attn_3"),
        ({"has_sinks": True, "num_heads": 128}, "flash_attn_3"),
        ({"has_sinks": True, "head_size": 64, "head_size_v": 128}, "flash_attn_4"),
        ({"head_size": 96, "head_size_v": 112}, "flash_attn_4"),
        ({"head_size": 64, "head_size_v": 32}, "vllm_flash_attn_3"),
        ({"head_size": 32, "head_size_v": 64}, "flash_attn_4"),
        ({"head_size": 32, "head_size_v": 72}, "vllm_flash_attn_3"),
        ({"softcap": 30.0, "needs_lse": True}, None),
        ({"softcap": 30.0}, "vllm_flash_attn_3"),
        ({"kv_cache_dtype": "fp8"}, "vllm_flash_attn_3"),
        ({"kv_cache_dtype": "fp8", "dtype": torch.float16}, None),
        ({"kv_cache_dtype": "fp8", "head_size": 72}, None),
        ({"kv_cache_dtype": "fp8", "has_alibi": True}, None),
        ({"batch_invariant": True}, "vllm_flash_attn_3"),
        ({"batch_invariant": True, "block_size": 128}, "vllm_flash_attn_2"),
        ({"batch_invariant": True, "block_size": 128, "has_sinks": True}, None),
        ({"use_mm_prefix": True}, None),
        ({"per_request_causal": True}, None),
        ({"chunk_size": 64}, None),
        ({"head_size": 100}, None),
        ({"head_size": 264}, None),
        ({"block_size": 24}, None),
        ({"dtype": torch.float32}, None),
    ],
)
def test_what_is_asked_decides_on_hopper(fields: dict[str, Any], expected: str | None) -> None:
    assert library("9.0", **fields) == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"head_size": 192, "head_size_v": 128}, "flash_attn_4"),
        ({"head_size": 192}, "vllm_flash_attn_2"),
        ({"head_size": 256}, "flash_attn_4"),
        ({"head_size": 256, "head_size_v": 128}, None),
        ({"head_size": 64, "head_size_v": 128}, "flash_attn_4"),
        ({"batch_invariant": True}, "vllm_flash_attn_2"),
        ({"kv_cache_dtype": "fp8"}, None),
    ],
)
def test_widths_of_flash_attention_4_on_blackwell(
    fields: dict[str, Any], expected: str | None
) -> None:
    assert library("10.0", **fields) == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"head_size": 72}, None),
        ({"head_size": 80}, "flash_attn_4"),
        ({"head_size": 80, "head_size_v": 72}, None),
        ({"head_size": 72, "attn_type": AttentionType.ENCODER_ONLY}, "flash_attn_4"),
    ],
)
def test_flash_attention_4_reads_pages_of_heads_in_steps_of_16(
    fields: dict[str, Any], expected: str | None
) -> None:
    assert library("9.0", inventory(flash_attn_4=None), **fields) == expected


def test_a_build_serves_what_it_was_compiled_with() -> None:
    found = inventory(flash_attn_3=build_of(TOKENSPEED, "sinks"), flash_attn=build_of())
    assert library("9.0", found) == "flash_attn_3"
    assert library("9.0", found, softcap=30.0, block_size=256) == "flash_attn"
    assert library("9.0", found, has_sinks=True) == "flash_attn_3"
    refused = reason("9.0", found, softcap=30.0)
    assert (refused.code, refused.value) == ("softcap", "30.0")
    assert "FLASHATTENTION_DISABLE_SOFTCAP" in refused.allowed
    assert "a multiple of 256" in refused.allowed


def test_a_build_without_the_argument_takes_no_sinks() -> None:
    refused = reason("9.0", inventory(flash_attn_3=build_of(TOKENSPEED)), has_sinks=True)
    assert (refused.code, refused.value) == ("sink", "True")


@pytest.mark.parametrize("attn_type", [AttentionType.DECODER, AttentionType.ENCODER_DECODER])
def test_a_build_without_pages_is_explained(attn_type: AttentionType) -> None:
    found = inventory(fa3_fwd=build_of(NO_PAGES))
    refused = reason("9.0", found, attn_type=attn_type)
    assert refused.code == "paged_cache"
    assert "FLASHATTENTION_DISABLE_PAGEDKV" in refused.allowed
    assert library("9.0", found, attn_type=AttentionType.ENCODER_ONLY) == "fa3_fwd"


@pytest.mark.parametrize(
    ("fields", "code"), [({"dtype": torch.float16}, "dtype"), ({"window": (4, 0)}, "window")]
)
def test_a_build_without_pages_has_fewer_kernels_too(fields: dict[str, Any], code: str) -> None:
    found = inventory(fa3_fwd=build_of(NO_PAGES))
    asked = {"attn_type": AttentionType.ENCODER, **fields}
    assert reason("9.0", found, **asked).code == code


def test_pages_of_the_repositorys_flash_attention_2_are_large() -> None:
    found = inventory(flash_attn=build_of())
    refused = reason("8.0", found)
    assert (refused.code, refused.value) == ("block_size", "16")
    assert refused.allowed == "flash_attn: a multiple of 256"
    assert library("8.0", found, block_size=512) == "flash_attn"
    assert page_multiple(device_from_arch("8.0"), found) == 256
    assert page_multiple(device_from_arch("8.0"), EVERYTHING) == 16


def test_a_refusal_says_what_would_mend_it_in_the_loaders_words() -> None:
    words = "ImportError: flash_attn_3/_C.abi3.so: undefined symbol: _ZN3c104cuda9SetDeviceEa"
    found = inventory(flash_attn_3=words, flash_attn=build_of())
    refused = reason("9.0", found, kv_cache_dtype="fp8", block_size=256)
    assert (refused.code, refused.value) == ("kv_cache_dtype", "fp8")
    assert refused.allowed == "flash_attn: auto"
    assert words in refused.hint
    assert "pip install flash_attn_3" in refused.hint


@pytest.mark.parametrize("arch", ["8.0", "9.0", "10.0"])
def test_a_named_generation_is_taken_or_refused(arch: str) -> None:
    served = {"8.0": {2}, "9.0": {2, 3, 4}, "10.0": {2, 4}}[arch]
    for version in (2, 3, 4):
        resolved = provider(arch, flash_attn_version=version)
        assert (resolved is not None) == (version in served)
        assert resolved is None or resolved.version == version


def test_a_named_generation_that_cannot_serve_gives_its_reasons() -> None:
    refused = reason("9.0", EVERYTHING, flash_attn_version=4, has_alibi=True)
    assert (refused.code, refused.value) == ("flash_attn_version", "4")
    # ALiBi is FlashAttention 2's alone: neither 4, which was refused, nor 3 is among the allowed.
    assert refused.allowed.startswith("2 on sm_90 | flash_attn_4: alibi=True")
    refused = reason("8.0", EVERYTHING, flash_attn_version=3)
    assert refused.allowed == "2 on sm_80"
    refused = reason("9.0", EVERYTHING, flash_attn_version=3, head_size=512)
    assert refused.allowed.startswith("no version on sm_90 | ")


def test_nothing_installed_names_every_library() -> None:
    absent = VendorEntry(name="flash_attn", status=VendorStatus.ABSENT, install="pip install x")
    refused = reason("8.0", Inventory((absent,)), block_size=256)
    assert "flash_attn is not installed; to install it: pip install x" in refused.hint


def test_order_of_libraries() -> None:
    assert libraries_for(device_from_arch("9.0")) == (
        *("vllm_flash_attn_3", "flash_attn_3", "fa3_fwd", "flash_attn_4"),
        *("vllm_flash_attn_2", "flash_attn"),
    )
    assert libraries_for(device_from_arch("7.5")) == ()


@pytest.mark.parametrize(
    ("name", "argument"),
    [
        ("flash_attn_3", "fwd.out"),
        ("vllm_flash_attn_3", "flash_attn_varlen_func.scheduler_metadata"),
    ],
)
def test_a_schedule_is_a_matter_of_the_build(name: str, argument: str) -> None:
    scheduled = VendorBuild(version="1.0", optional_arguments=frozenset({argument}))
    for build, expected in ((build_of(), False), (scheduled, True)):
        resolved = provider("9.0", inventory(**{name: build}))
        assert resolved is not None
        assert resolved.has_schedule is expected


def test_the_operator_of_flash_attention_3_writes_to_an_output() -> None:
    operator = VendorBuild(version="1.0", optional_arguments=frozenset({"fwd.out"}))
    for build, expected in ((build_of(), False), (operator, True)):
        resolved = provider("9.0", inventory(flash_attn_3=build))
        assert resolved is not None
        assert resolved.writes_out is expected


def test_a_provider_reads_as_what_it_is() -> None:
    found = inventory(flash_attn=build_of())
    assert str(provider("8.0", found, block_size=256)) == "FlashAttention 2 of flash_attn 1.0"


# Recorded decisions of vLLM 0.25.1, whose own builds of 2 and 3 and the file of 4 are there.

RECORDED = inventory(vllm_flash_attn_2=None, vllm_flash_attn_3=None, flash_attn_4=None)


def explained(row: dict[str, Any], ours: int | None) -> str | None:
    """Name the reason why a decision differs, None where nothing explains it."""
    named, size, theirs = row["forced_version"], row["head_size"], row["version"]
    width_v = row["head_size_v"] or size
    is_blackwell = row["arch"].startswith("10.")
    if named is not None and theirs not in (None, named) and ours is None:
        return "a named generation is replaced by another"
    if size == 512 and ours is None:
        return "no build has kernels for heads of 512"
    if width_v != size and theirs == 2 and ours is None:
        return "FlashAttention 2 takes value heads of the same width alone"
    if is_blackwell and size == width_v == 192 and theirs == 4:
        return "flash-attn-4 takes 192 with values of 128 alone on Blackwell"
    if is_blackwell and size == 256 and (theirs, ours) == (2, 4):
        return "flash-attn-4 has kernels for 256 on Blackwell"
    return None


REASONS = {
    "a named generation is replaced by another",
    "no build has kernels for heads of 512",
    "FlashAttention 2 takes value heads of the same width alone",
    "flash-attn-4 takes 192 with values of 128 alone on Blackwell",
    "flash-attn-4 has kernels for 256 on Blackwell",
}


def recorded_rows() -> list[dict[str, Any]]:
    default = Path(__file__).resolve().parents[4] / "shared" / "oracle"
    path = Path(os.environ.get("ATTN_ORACLE_DIR") or default) / "fa_version.jsonl"
    if not path.is_file():
        pytest.skip(f"no recorded decisions (ATTN_ORACLE_DIR): {path.name}")
    rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [row for row in rows if row["platform"] == "cuda"]


def test_recorded_decisions_differ_for_named_reasons_alone() -> None:
    used: Counter[str] = Counter()
    for row in recorded_rows():
        resolved = provider(
            row["arch"],
            RECORDED,
            head_size=row["head_size"] or 128,
            head_size_v=row["head_size_v"],
            flash_attn_version=row["forced_version"],
            batch_invariant=row["batch_invariant"],
            has_alibi=row["requires_alibi"],
            has_sinks=row["has_sinks"],
        )
        ours = None if resolved is None else resolved.version
        if ours != row["version"]:
            why = explained(row, ours)
            assert why is not None, (row, ours)
            used[why] += 1
    assert set(used) == REASONS
