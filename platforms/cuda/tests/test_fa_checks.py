"""What one library objects to: every reason at once, each with value and what is allowed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fa_testing import TOKENSPEED, build_of, request

from attn_cuda._fa_checks import Library, objections
from attn_shared.device import device_from_arch
from attn_shared.inventory import VendorBuild

SECOND = Library(name="flash_attn", version=2, majors=(8, 9), page_multiple=256)
THIRD = Library(name="flash_attn_3", version=3, majors=(9,))
FOURTH = Library(name="flash_attn_4", version=4, majors=(9, 10, 11))


def codes(
    library: Library, build: VendorBuild | None = None, arch: str = "sm_90", **fields: Any
) -> list[str]:
    found = objections(library, build, device_from_arch(arch), request(**fields))
    return [reason.code for reason in found]


def test_every_objection_is_named() -> None:
    asked = {"head_size": 100, "has_sinks": True, "kv_cache_dtype": "fp8", "use_mm_prefix": True}
    assert codes(SECOND, **asked) == [
        *("head_size", "block_size", "kv_cache_dtype", "sink", "mm_prefix"),
    ]


def test_a_complete_build_objects_to_what_no_kernel_has() -> None:
    assert codes(THIRD) == []
    assert codes(THIRD, softcap=2.0) == []
    assert codes(THIRD, has_alibi=True) == ["alibi"]
    assert codes(FOURTH, batch_invariant=True) == ["batch_invariance"]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"softcap": 2.0}, ["softcap"]),
        ({"head_size": 64, "head_size_v": 32}, ["head_size_v"]),
        ({"head_size": 192, "head_size_v": 128}, ["head_size_v"]),
        ({"has_sinks": True}, []),
    ],
)
def test_a_build_objects_to_what_it_was_compiled_without(
    fields: dict[str, Any], expected: list[str]
) -> None:
    assert codes(THIRD, build_of(TOKENSPEED, "sinks"), **fields) == expected


@pytest.mark.parametrize(
    ("size", "value_size", "is_served"),
    [
        *((64, 32, True), (64, 72, True), (64, 512, True), (32, 64, False), (64, 520, False)),
        *((192, 128, True), (136, 104, True), (192, 96, False), (128, 96, False)),
    ],
)
def test_widths_of_flash_attention_3(size: int, value_size: int, is_served: bool) -> None:
    asked = {"head_size": size, "head_size_v": value_size}
    assert (codes(THIRD, **asked) == []) is is_served


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_fp8_kernels_return_bfloat16(dtype: torch.dtype) -> None:
    assert "kv_cache_dtype" in codes(THIRD, kv_cache_dtype="fp8", dtype=dtype)


def test_a_reason_reads_as_a_sentence() -> None:
    (reason,) = objections(SECOND, None, device_from_arch("sm_80"), request())
    assert str(reason) == "block_size=16 (allowed: a multiple of 256)"
