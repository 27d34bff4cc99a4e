from __future__ import annotations

import math

import pytest
import torch
from mla_testing import decodes, latent_layer

from attn_conformance.stubs.modules import VendorStub, stub_vendor
from attn_conformance.stubs.vendors.flash_mla import SGL_FLASH_MLA, TOKENSPEED_FLASH_MLA
from attn_cuda._flashmla_call import FlashMLACall, schedules
from attn_cuda._vendor.flash_mla import extra_for
from attn_shared.mla_edges import to_contract_lse

BUILDS = pytest.mark.parametrize("stub", [TOKENSPEED_FLASH_MLA, SGL_FLASH_MLA])


@BUILDS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("query_len", "seq_lens", "heads"), [(1, [1, 64, 130], 16), (3, [70, 3], 5), (2, [65], 128)]
)
def test_decodes_of_each_build(
    stub: VendorStub, dtype: torch.dtype, query_len: int, seq_lens: list[int], heads: int
) -> None:
    given = decodes(
        latent_layer(dtype=dtype, num_heads=heads), [query_len] * len(seq_lens), seq_lens
    )
    with stub_vendor(stub) as recorder:
        output, lse = FlashMLACall(given.layer, 512)(
            given.query, given.kv_cache, given.step(64), schedules()
        )
    assert given.problems(output, lse) == ()
    call = recorder.of("flash_mla_with_kvcache")[0]
    assert not call.positional
    assert call.arguments["causal"] is (query_len > 1)
    assert ("use_legacy" in call.given) is (stub is SGL_FLASH_MLA)


@BUILDS
def test_layers_of_a_step_share_its_schedule_and_no_other_steps(stub: VendorStub) -> None:
    with stub_vendor(stub) as recorder:
        first, second = (decodes(latent_layer(), [1, 1], lens) for lens in ([5, 70], [9, 200]))
        layers = [FlashMLACall(first.layer, 512) for _ in range(2)]
        for given in (first, second):
            step, shared = given.step(64), schedules()
            for call in layers:
                output, _ = call(given.query, given.kv_cache, step, shared)
                assert given.problems(output) == ()
        metas = [
            call.arguments["tile_scheduler_metadata"]
            for call in recorder.of("flash_mla_with_kvcache")
        ]
    assert metas[0] is metas[1]
    assert metas[2] is metas[3]
    assert metas[0] is not metas[2]


def test_a_schedule_of_other_lengths_is_renewed() -> None:
    with stub_vendor(TOKENSPEED_FLASH_MLA):
        given = decodes(latent_layer(), [1, 1], [5, 70])
        call, shared, step = FlashMLACall(given.layer, 512), schedules(), given.step(64)
        call(given.query, given.kv_cache, step, shared)
        step.seq_lens[1] = 66
        with pytest.raises(RuntimeError, match="not those that the schedule was made for"):
            call(given.query, given.kv_cache, step, shared)
        shared.renew()
        output, lse = call(given.query, given.kv_cache, step, shared)
        given.seq_lens[1] = 66
        assert given.problems(output, lse) == ()


@BUILDS
def test_rows_without_keys_come_as_zero_with_an_lse_to_be_put_right(stub: VendorStub) -> None:
    given = decodes(latent_layer(), [1, 1], [7, 0])
    with stub_vendor(stub):
        output, lse = FlashMLACall(given.layer, 512)(
            given.query, given.kv_cache, given.step(64), schedules()
        )
    assert lse[0, 1] == math.inf
    assert given.problems(output, to_contract_lse(lse)) == ()


@pytest.mark.parametrize("scale", [-0.05, 0.0])
def test_a_scale_that_is_not_positive(scale: float) -> None:
    given = decodes(latent_layer(scale=scale), [1, 1], [70, 3])
    with stub_vendor(TOKENSPEED_FLASH_MLA):
        output, lse = FlashMLACall(given.layer, 512)(
            given.query, given.kv_cache, given.step(64), schedules()
        )
    assert given.problems(output, lse) == ()


def test_blocks_of_several_pages_are_cut() -> None:
    given = decodes(latent_layer(block_size=192), [1, 1], [400, 70])
    with stub_vendor(TOKENSPEED_FLASH_MLA) as recorder:
        output, lse = FlashMLACall(given.layer, 512)(
            given.query, given.kv_cache, given.step(64), schedules()
        )
    assert given.problems(output, lse) == ()
    assert recorder.calls[-1].arguments["k_cache"].shape[1:] == (64, 1, 576)


def test_an_fp8_cache_by_the_build_that_reads_it() -> None:
    layer = latent_layer(kv_cache_dtype="fp8")
    given = decodes(layer, [1, 1], [70, 130], cache_scale=0.5)
    scales = (torch.ones(1), torch.full((1,), 0.5))
    with stub_vendor(SGL_FLASH_MLA) as recorder:
        call, shared = FlashMLACall(layer, 512), schedules()
        for _ in range(2):
            output, lse = call(given.query, given.kv_cache, given.step(64), shared, scales=scales)
    assert given.problems(output, lse) == ()
    assert len(recorder.of("get_mla_decoding_metadata")) == 1


@pytest.mark.parametrize(
    ("torch_version", "extra"),
    [
        ("2.11.0+cu130", "flashmla-hopper"),
        ("2.8.0", "flashmla-hopper"),
        ("2.13.0+cpu", "flashmla"),
        ("2.15.0.dev20261101", "flashmla"),
    ],
)
def test_the_extra_that_fits_a_torch(torch_version: str, extra: str) -> None:
    assert extra_for(torch_version) == extra
