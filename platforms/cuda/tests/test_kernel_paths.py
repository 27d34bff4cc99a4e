"""What FLASH_ATTN and FLASHINFER say of the kernels that a request would run on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attn_cuda.backends.flash_attn import FlashAttnBackend
from attn_cuda.backends.flashinfer import FlashInferBackend
from attn_cuda.backends.flashinfer_trtllm import FlashInferTrtllmBackend
from attn_shared.backend import AttentionBackend
from attn_shared.device import preset
from attn_shared.inventory import Inventory, VendorEntry, VendorStatus
from attn_shared.request import AttentionRequest


def told(
    backend: type[AttentionBackend], device: str, *libraries: str, **changes: Any
) -> dict[str, tuple[str, str]]:
    plain: dict[str, Any] = {"num_heads": 32, "num_kv_heads": 8, "head_size": 128}
    request = AttentionRequest(**{**plain, "dtype": torch.bfloat16, "block_size": 16, **changes})
    entries = tuple(
        VendorEntry(name=name, status=VendorStatus.PRESENT, install="") for name in libraries
    )
    paths = backend.kernel_paths(request, preset(device), Inventory(entries))
    return {path.rows: (path.kernel, path.why) for path in paths}


def test_flash_attn_names_its_build_and_those_that_come_first() -> None:
    (first,) = told(FlashAttnBackend, "h100", "vllm_flash_attn_3", "flash_attn").values()
    assert first == ("FlashAttention 3 of vllm_flash_attn_3", "the first for sm_90")
    (other,) = told(FlashAttnBackend, "h100", "vllm_flash_attn_2").values()
    assert other[0] == "FlashAttention 2 of vllm_flash_attn_2"
    assert "before it vllm_flash_attn_3: " in other[1]
    assert told(FlashAttnBackend, "h100") == {}


@pytest.mark.parametrize(
    ("changes", "decode"),
    [
        ({}, "decode on tensor cores"),
        ({"num_kv_heads": 16}, "plain decode"),
        ({"num_kv_heads": 16, "kv_cache_dtype": "fp8"}, "decode on tensor cores"),
        ({"dcp_size": 2, "needs_lse": True}, "plain decode"),
    ],
)
def test_flashinfer_says_what_decodes(changes: dict[str, Any], decode: str) -> None:
    assert told(FlashInferBackend, "h100", **changes)["decodes"][0] == decode


def test_flashinfer_says_which_prompts_run_on_hoppers_kernels() -> None:
    found = told(FlashInferBackend, "h100")
    assert (found["prompts"][0], found["short prompts"][0]) == ('"fa3"', '"fa2"')
    assert told(FlashInferBackend, "h100", dcp_size=2)["prompts"][0] == '"fa3"'
    quantised = told(FlashInferBackend, "h100", kv_cache_dtype="fp8")["prompts"]
    assert quantised == ('"fa2"', "the cache is quantised")
    assert told(FlashInferBackend, "a100")["prompts"] == ('"fa2"', "sm_80 has no others")


def test_trtllm_has_both_phases_on_blackwell_and_decode_on_hopper() -> None:
    new, old = (told(FlashInferTrtllmBackend, device) for device in ("b200", "h100"))
    assert [kernel for kernel, _ in new.values()] == ["trtllm-gen", "trtllm-gen"]
    assert [kernel for kernel, _ in old.values()] == ["xqa", '"fa3"', '"fa2"']
