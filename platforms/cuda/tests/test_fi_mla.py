from __future__ import annotations

import pytest
import torch
from mla_testing import SMALL, decodes, latent_layer

from attn_conformance.stubs.modules import VendorStub, stub_vendor
from attn_conformance.stubs.vendors.flashinfer_mla import FLASHINFER_MLA_0_6, FLASHINFER_MLA_0_7
from attn_cuda._fi_mla_plan import PlannedMLA
from attn_cuda._fi_mla_trtllm import TABLE_TOKENS, TrtllmMLA, trtllm_page_size
from attn_cuda._vendor.flashinfer_mla import interface
from attn_shared.errors import UnsupportedOptionError
from attn_shared.page_lists import page_indices
from attn_shared.request import MLADims

RELEASES = pytest.mark.parametrize("stub", [FLASHINFER_MLA_0_6, FLASHINFER_MLA_0_7])


def workspace() -> torch.Tensor:
    return torch.zeros(64, dtype=torch.uint8)


@RELEASES
@pytest.mark.parametrize("is_captured", [False, True])
@pytest.mark.parametrize("scale", [0.07, -0.1])
@pytest.mark.parametrize(("query_len", "seq_lens"), [(1, [1, 0, 130]), (2, [66, 2, 64])])
def test_planned_decodes_of_each_release(
    stub: VendorStub, is_captured: bool, scale: float, query_len: int, seq_lens: list[int]
) -> None:
    given = decodes(latent_layer(scale=scale), [query_len] * 3, seq_lens)
    step = given.step(64)
    with stub_vendor(stub) as recorder:
        planned = PlannedMLA(
            interface(),
            given.layer,
            512,
            page_size=64,
            workspace=workspace(),
            backend="fa3",
            list_pages=page_indices,
            most_pages=step.block_table.numel() if is_captured else 0,
            num_reqs=3 if is_captured else 0,
        )
        planned.plan(step, given.starts, given.seq_lens)
        output, lse = planned(given.query, given.kv_cache, with_lse=True)
        assert given.problems(output, lse) == ()
        out = torch.full_like(output, torch.nan)
        output, _ = planned(given.query, given.kv_cache, out)
        assert output is out
        assert given.problems(out) == ()
    assert all(not call.positional for call in recorder.calls if call.function.endswith("run"))


@RELEASES
@pytest.mark.parametrize("dims", [MLADims(), SMALL])
@pytest.mark.parametrize(
    ("block_size", "query_len", "seq_lens"), [(32, 1, [1, 40]), (64, 2, [130, 64]), (96, 1, [100])]
)
def test_trtllm_decodes_of_each_release(
    stub: VendorStub, dims: MLADims, block_size: int, query_len: int, seq_lens: list[int]
) -> None:
    layer = latent_layer(dims, block_size=block_size)
    given = decodes(layer, [query_len] * len(seq_lens), seq_lens)
    page = trtllm_page_size(block_size)
    step = given.step(page, width_multiple=TABLE_TOKENS // page)
    with stub_vendor(stub) as recorder:
        call = TrtllmMLA(interface(), layer, dims)
        output, lse = call(given.query, given.kv_cache, step, workspace(), with_lse=True)
        plain, _ = call(given.query, given.kv_cache, step, workspace())
    assert given.problems(output, lse) == ()
    assert torch.equal(plain, output)
    assert not recorder.calls[0].positional


def test_trtllm_reads_an_fp8_cache() -> None:
    layer = latent_layer(kv_cache_dtype="fp8")
    given = decodes(layer, [1, 1], [70, 30], cache_scale=0.25)
    with stub_vendor(FLASHINFER_MLA_0_6):
        call = TrtllmMLA(interface(), layer, MLADims())
        output, lse = call(
            given.query,
            given.kv_cache,
            given.step(64, width_multiple=2),
            workspace(),
            scales=(1.0, 0.25),
            with_lse=True,
        )
    assert given.problems(output, lse) == ()


def test_a_block_that_is_no_multiple_of_trtllms_pages() -> None:
    with pytest.raises(UnsupportedOptionError, match=r"block_size=48 .*allowed: a multiple of 32"):
        trtllm_page_size(48)
