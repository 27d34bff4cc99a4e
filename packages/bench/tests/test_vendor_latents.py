"""Each vendor's peer over latents against a stub that computes from exactly what it was handed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attn_bench_testing import CPU, workload

from attn_bench.agreement import check_agreement
from attn_bench.contenders import Prepared
from attn_bench.peers import contender_named
from attn_bench.workloads import Heads, Workload
from attn_conformance.stubs.modules import VendorStub, stub_vendor
from attn_conformance.stubs.vendors.flash_mla import SGL_FLASH_MLA, TOKENSPEED_FLASH_MLA
from attn_conformance.stubs.vendors.flashinfer_mla import FLASHINFER_MLA_0_6, FLASHINFER_MLA_0_7
from attn_conformance.stubs.vendors.vllm_flash_attn import SCHEDULER_METADATA, VLLM_FLASH_ATTN_3
from attn_shared.errors import UnsupportedOptionError

(_INTERFACE,) = VLLM_FLASH_ATTN_3.modules.values()
VLLM = replace(
    VLLM_FLASH_ATTN_3,
    modules={
        "vllm.vllm_flash_attn": {
            "flash_attn_varlen_func": _INTERFACE["flash_attn_varlen_func"],
            "get_scheduler_metadata": SCHEDULER_METADATA,
            "fa_version_unsupported_reason": lambda version: None,
        },
    },
)
STUBS: dict[str, tuple[str, VendorStub]] = {
    "tokenspeed": ("flash_mla", TOKENSPEED_FLASH_MLA),
    "sgl": ("flash_mla", SGL_FLASH_MLA),
    "vllm": ("flash_attn_3_vllm_mla", VLLM),
    "flashinfer": ("flashinfer_mla", FLASHINFER_MLA_0_6),
}


def latents(query_lens: tuple[int, ...], seq_lens: tuple[int, ...], **fields: object) -> Workload:
    plain = {"heads": Heads.latents(16), "dtype": torch.bfloat16, "block_size": 64}
    return workload(query_lens, seq_lens, **(plain | fields))


def prepared(name: str, asked: Workload) -> Prepared:
    return contender_named(name).prepare(asked, CPU, 2, is_captured=False)


@pytest.mark.parametrize("key", STUBS)
@pytest.mark.parametrize(
    "asked",
    [
        latents((1, 1), (21, 140)),
        latents((2, 2), (64, 5)),
        latents((1, 1, 1), (1, 70, 33), returns_lse=True),
        latents((1,), (21,), own_output=True),
    ],
    ids=lambda asked: asked.name,
)
def test_a_peer_agrees_with_the_reference(key: str, asked: Workload) -> None:
    name, stub = STUBS[key]
    with stub_vendor(stub):
        found = prepared(name, asked)
        for copy in found.copies:
            check_agreement(name, copy, copy.call())
    assert dict(found.libraries) == {stub.distribution: stub.version}


def test_plans_are_the_librarys_own_and_made_ahead() -> None:
    for key, function in (("vllm", "get_scheduler_metadata"), ("flashinfer", "plan")):
        name, stub = STUBS[key]
        with stub_vendor(stub) as recorder:
            found = prepared(name, latents((1, 1), (21, 140)))
            before = len(recorder.calls)
            found.copies[0].call()
            assert len(recorder.calls) == before + 1
            assert found.plan is not None
            found.plan()
            assert recorder.calls[-1].function.endswith(function)
            check_agreement(name, found.copies[1], found.copies[1].call())


def test_layers_share_the_schedule_that_the_first_makes() -> None:
    with stub_vendor(TOKENSPEED_FLASH_MLA) as recorder:
        for copy in prepared("flash_mla", latents((1,), (21,))).copies:
            copy.call()
    schedules = {
        id(call.arguments["tile_scheduler_metadata"])
        for call in recorder.of("flash_mla_with_kvcache")
    }
    assert len(schedules) == 1


@pytest.mark.parametrize("asked", [latents((1, 2), (21, 40)), latents((1,), (21,), block_size=16)])
def test_what_flash_mla_does_not_decode(asked: Workload) -> None:
    with (
        stub_vendor(TOKENSPEED_FLASH_MLA),
        pytest.raises(UnsupportedOptionError, match="allowed: blocks of 64, and as many"),
    ):
        prepared("flash_mla", asked)


def test_a_release_that_plans_otherwise() -> None:
    with (
        stub_vendor(FLASHINFER_MLA_0_7),
        pytest.raises(UnsupportedOptionError, match=r"allowed: FlashInfer 0\.6"),
    ):
        prepared("flashinfer_mla", latents((1,), (21,)))


@pytest.mark.parametrize("key", STUBS)
def test_ordinary_heads_and_other_formats_are_refused(key: str) -> None:
    name, stub = STUBS[key]
    with stub_vendor(stub):
        with pytest.raises(UnsupportedOptionError, match="decodes over latents; allowed"):
            prepared(name, workload((1,), (21,)))
        with pytest.raises(UnsupportedOptionError, match="reads no cache of kv_cache_dtype=fp8"):
            prepared(name, latents((1,), (21,), kv_cache_dtype="fp8"))
