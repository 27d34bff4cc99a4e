from __future__ import annotations

from typing import Any

import pytest
import torch
from fa_testing import build_of, inventory
from mla_testing import SMALL, decodes, latent_layer

from attn_conformance.stubs.modules import VendorStub, stub_vendor
from attn_conformance.stubs.vendors.flash_attn_3 import FLASH_ATTN_3, FLASH_ATTN_3_LATENT
from attn_conformance.stubs.vendors.vllm_flash_attn import VLLM_FLASH_ATTN_3
from attn_cuda._fa_mla_call import FlashAttnMLACall, latent_schedule, resolve_provider
from attn_cuda._fa_providers import Provider
from attn_cuda._fa_step import KeyStep
from attn_cuda._vendor import flash_attn_3, vllm_flash_attn_3
from attn_shared.capability import Reason
from attn_shared.inventory import VendorBuild
from attn_shared.request import MLADims

STUBS: dict[str, tuple[VendorStub, Any]] = {
    "vllm_flash_attn_3": (VLLM_FLASH_ATTN_3, vllm_flash_attn_3),
    "flash_attn_3": (FLASH_ATTN_3_LATENT, flash_attn_3),
}


def provider_of(name: str) -> Provider:
    found = resolve_provider(inventory(**{name: STUBS[name][1].probe()}))
    assert isinstance(found, Provider)
    return found


@pytest.mark.parametrize("name", STUBS)
@pytest.mark.parametrize("dims", [MLADims(), SMALL])
@pytest.mark.parametrize(
    ("query_lens", "seq_lens"), [([1, 1, 1], [1, 33, 100]), ([3, 1, 0, 5], [40, 1, 7, 5])]
)
def test_decodes_of_each_library(
    name: str, dims: MLADims, query_lens: list[int], seq_lens: list[int]
) -> None:
    given = decodes(latent_layer(dims, block_size=16, num_heads=8), query_lens, seq_lens)
    step = given.step(16)
    keys = KeyStep(
        query_start_loc=step.query_start_loc,
        max_query_len=step.max_query_len,
        max_key_len=step.max_seq_len,
        causal=True,
        key_lens=step.seq_lens,
        block_table=step.block_table,
    )
    with stub_vendor(STUBS[name][0]) as recorder:
        call = FlashAttnMLACall(provider_of(name), given.layer, dims.kv_lora_rank)
        output, lse = call(given.query, given.kv_cache, keys, with_lse=True)
        plain, nothing = call(given.query, given.kv_cache, keys)
    assert given.problems(output, lse) == ()
    assert torch.equal(plain, output)
    assert nothing is None
    assert all(not one.positional for one in recorder.calls)


def test_the_output_is_written_in_place_where_the_library_can() -> None:
    given = decodes(latent_layer(scale=-0.1, block_size=16), [1], [20])
    step = given.step(16)
    keys = KeyStep(
        query_start_loc=step.query_start_loc,
        max_query_len=1,
        max_key_len=20,
        causal=True,
        key_lens=step.seq_lens,
        block_table=step.block_table,
    )
    with stub_vendor(VLLM_FLASH_ATTN_3) as recorder:
        provider = provider_of("vllm_flash_attn_3")
        assert provider.writes_out
        assert provider.has_schedule
        out = torch.full((1, 16, 512), torch.nan, dtype=torch.bfloat16)
        call = FlashAttnMLACall(provider, given.layer, 512)
        output, _ = call(given.query, given.kv_cache, keys, out)
        assert output is out
        latent_schedule(provider, given.layer, keys, page_size=16, kv_lora_rank=512)
    assert given.problems(out) == ()
    asked = recorder.of("get_scheduler_metadata")[0].arguments
    assert (asked["headdim"], asked["headdim_v"], asked["num_heads_kv"]) == (64, 512, 1)


def test_builds_without_the_argument_or_the_kernels_are_refused_with_the_reason() -> None:
    with stub_vendor(FLASH_ATTN_3):
        tokenspeed = flash_attn_3.probe()
    found = resolve_provider(
        inventory(flash_attn_3=tokenspeed, vllm_flash_attn_3=VendorBuild(version="0.9"))
    )
    assert isinstance(found, Reason)
    assert found.code == "flash_attn_qv"
    assert "vllm_flash_attn_3: 1.0 has no flash_attn_varlen_func.q_v" in found.allowed
    assert "FLASHATTENTION_DISABLE_HDIMDIFF64" in found.allowed


def test_the_first_library_that_has_it_is_taken() -> None:
    build = build_of({}, "x")
    complete = VendorBuild(
        version="3", optional_arguments=frozenset({"flash_attn_with_kvcache.qv"})
    )
    found = resolve_provider(inventory(vllm_flash_attn_3=build, flash_attn_3=complete))
    assert isinstance(found, Provider)
    assert found.library == "flash_attn_3"
    assumed = resolve_provider(inventory(vllm_flash_attn_3=None, flash_attn_3=None))
    assert isinstance(assumed, Provider)
    assert assumed.library == "vllm_flash_attn_3"
