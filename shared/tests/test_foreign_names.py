from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from attn_shared_fakes import request

from attn_shared.device import Vendor
from attn_shared.errors import InvalidInputError, NoBackendError, UnknownNameError
from attn_shared.foreign_names import (
    FOREIGN_NAMES,
    backend_for,
    family_of,
    find_foreign_name,
    names_elsewhere,
)
from attn_shared.known_backends import KNOWN_BACKENDS, KNOWN_MAMBA_BACKENDS
from attn_shared.request import AttentionRequest, MLADims

LATENT = AttentionRequest(num_heads=16, num_kv_heads=1, head_size=576, mla=MLADims())


@pytest.mark.parametrize(
    ("text", "backends"),
    [
        ("vllm:FLASHINFER", ("FLASHINFER", "FLASHINFER_TRTLLM")),
        ("vllm:TRITON_MLA", ("TRITON_MLA",)),
        ("vllm:GDN_ATTN", ("GDN_ATTN",)),
        ("vllm:custom", ()),
        ("sglang:triton", ("TRITON_ATTN", "TRITON_MLA")),
        ("SGLang:FA3", ("FLASH_ATTN", "FLASH_ATTN_MLA")),
        ("transformers:sdpa", ("TORCH_SDPA",)),
        ("transformers:paged|sdpa", ("TORCH_SDPA",)),
        ("transformers:eager", ()),
    ],
)
def test_a_name_of_other_software(text: str, backends: tuple[str, ...]) -> None:
    assert find_foreign_name(text).backends == backends


@pytest.mark.parametrize(
    ("text", "version"),
    [("sglang:fa4", 4), ("transformers:flash_attention_2", 2), ("vllm:FLASH_ATTN", None)],
)
def test_a_name_may_mean_one_generation_of_flash_attention(text: str, version: int | None) -> None:
    assert find_foreign_name(text).flash_attn_version == version


@pytest.mark.parametrize("text", ["FLASHINFER", "tgi:flashinfer", "", ":x"])
def test_another_form_is_named_with_what_is_allowed(text: str) -> None:
    with pytest.raises(InvalidInputError, match="ORIGIN:NAME with one of vllm, sglang, transform"):
        find_foreign_name(text)


def test_a_name_that_nobody_has_is_corrected() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown sglang backend 'flashinfr'.*'flashinfer'"):
        find_foreign_name("sglang:flashinfr")


def test_names_both_ways() -> None:
    assert names_elsewhere("TORCH_SDPA") == {
        "vllm": ("TORCH_SDPA",),
        "sglang": ("torch_native",),
        "transformers": ("sdpa",),
    }
    assert names_elsewhere("FLASHINFER_TRTLLM") == {
        "vllm": ("FLASHINFER",),
        "sglang": ("trtllm_mha",),
    }
    assert names_elsewhere("TORCH_MLA") == {}


def test_every_backend_that_a_name_stands_for_is_known() -> None:
    known = {*KNOWN_BACKENDS, *KNOWN_MAMBA_BACKENDS}
    entries = [entry for names in FOREIGN_NAMES.values() for entry in names.values()]
    assert {name for entry in entries for name in entry.backends} <= known
    assert all(entry.backends or entry.note for entry in entries)


def test_every_recorded_name_of_vllm_is_there(
    oracle: Callable[[str], list[dict[str, Any]]],
) -> None:
    recorded = {row["name"] for row in oracle("capabilities")}
    assert recorded == set(FOREIGN_NAMES["vllm"])


@pytest.mark.parametrize(
    ("text", "asked", "vendor", "expected"),
    [
        ("sglang:triton", request(), Vendor.AMD, "TRITON_ATTN"),
        ("sglang:triton", LATENT, Vendor.NVIDIA, "TRITON_MLA"),
        ("vllm:FLASH_ATTN", request(), Vendor.NVIDIA, "FLASH_ATTN"),
        ("vllm:FLASH_ATTN", request(), Vendor.INTEL, "XPU_FLASH_ATTN"),
        (
            "sglang:nsa",
            LATENT.with_options(use_sparse=True, index_topk=2048),
            Vendor.NVIDIA,
            "FLASHMLA_SPARSE",
        ),
    ],
)
def test_a_request_and_a_vendor_tell_them_apart(
    text: str, asked: AttentionRequest, vendor: Vendor, expected: str
) -> None:
    assert backend_for(find_foreign_name(text), asked, vendor) == expected


@pytest.mark.parametrize(
    ("text", "asked", "vendor", "words"),
    [
        ("sglang:flashmla", request(), Vendor.NVIDIA, r"FLASHMLA \(mla: nvidia\); none is for mha"),
        ("vllm:FLASH_ATTN", request(), Vendor.AMD, "none is for mha on amd devices"),
        ("sglang:wave", request(), Vendor.AMD, "sglang:wave stands for nothing that attn has"),
    ],
)
def test_where_none_is_meant_it_says_what_the_name_stands_for(
    text: str, asked: AttentionRequest, vendor: Vendor, words: str
) -> None:
    with pytest.raises(NoBackendError, match=words):
        backend_for(find_foreign_name(text), asked, vendor)


def test_families() -> None:
    assert family_of(request()) == "mha"
    assert family_of(LATENT) == "mla"
    assert family_of(LATENT.with_options(use_sparse=True)) == "sparse_mla"
