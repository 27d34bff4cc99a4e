from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from attn_conformance.stubs.modules import VendorStub, stub_vendor
from attn_conformance.stubs.vendors.aiter_mla import AITER_MLA_0_1_7, AITER_MLA_HEAD
from attn_rocm._aiter_mla_call import AiterMLACall
from attn_rocm._aiter_mla_steps import TokenStep, TokenStepMaker
from attn_rocm._vendor import aiter_mla
from attn_rocm.backends.rocm_aiter_mla import AiterMLABackend
from attn_shared import reference
from attn_shared.accuracy import check_against_reference, eager_mla_decode
from attn_shared.device import preset
from attn_shared.errors import UnsupportedOptionError
from attn_shared.inventory import Inventory
from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.quantization import quantize_fp8
from attn_shared.request import AttentionRequest, MLADims
from attn_shared.spec import BuildConfig, LayerSpec

RELEASES = pytest.mark.parametrize("stub", [AITER_MLA_0_1_7, AITER_MLA_HEAD])
BLOCK = 16


def layer_of(num_heads: int) -> LayerSpec:
    dims = MLADims()
    return LayerSpec(
        num_heads=num_heads,
        num_kv_heads=1,
        head_size=dims.latent_size,
        head_size_v=dims.kv_lora_rank,
        scale=0.07,
        dtype=torch.bfloat16,
        mla=dims,
    )


def step_of(
    table: Tensor, starts: Tensor, lens: Tensor, *, is_known: bool = True, **config: Any
) -> TokenStep:
    """Describe decodes; where lengths are unknown on the host, all are as long as the longest."""
    common = CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=lens,
        seq_lens_cpu=lens.clone() if is_known else None,
        num_reqs=len(lens),
        num_actual_tokens=int(starts[-1]),
        max_query_len=int(starts.diff().max()),
        max_seq_len=int(lens.max()),
        block_table=table,
        block_size=BLOCK,
    )
    return TokenStepMaker(BuildConfig(**config), torch.device("cpu"), BLOCK).make(common)


@RELEASES
@pytest.mark.parametrize("num_heads", [1, 8, 12, 16, 32, 128])
@pytest.mark.parametrize("query_len", [1, 3])
@pytest.mark.parametrize("cache_scale", [None, 0.5])
def test_heads_are_padded_by_repetition_and_sliced_back(
    stub: VendorStub, num_heads: int, query_len: int, cache_scale: float | None
) -> None:
    layer = layer_of(num_heads)
    lens = torch.tensor([3, 40], dtype=torch.int32)
    table = torch.tensor([[5, 99, 99], [0, 2, 3]], dtype=torch.int32)
    starts = torch.tensor([0, query_len, 2 * query_len], dtype=torch.int32)
    query = torch.randn(2 * query_len, num_heads, 576, dtype=torch.bfloat16)
    cache, scales = torch.randn(6, BLOCK, 576, dtype=torch.bfloat16), None
    if cache_scale is not None:
        cache = quantize_fp8(cache, cache_scale, torch.float8_e4m3fn)
        scales = (torch.ones(1), torch.full((1,), cache_scale))
    with stub_vendor(stub) as recorder:
        call = AiterMLACall(layer, 512)
        output, lse = call(
            query,
            cache,
            step_of(table, starts, lens, is_known=query_len == 1),
            scales=scales,
            with_lse=call.returns_lse,
        )
    arguments: dict[str, Any] = {
        "scale": layer.scale,
        "kv_lora_rank": 512,
        "query_start_loc": starts,
        "seq_lens": lens,
        "block_table": table,
        "cache_scale": cache_scale or 1.0,
    }
    compute = None if cache_scale is None else torch.float8_e4m3fn
    report = check_against_reference(
        output,
        lse,
        reference.mla_decode(query, cache, **arguments),
        eager_mla_decode(query, cache, compute_dtype=compute, **arguments),
        dtype=torch.bfloat16,
    )
    assert report.ok, str(report)
    given = recorder.of("mla_decode_fwd")[0]
    assert given.arguments["q"].shape[1] == (16 if num_heads <= 16 else 128)
    assert not given.positional
    assert ("page_size" in given.given) is (stub is AITER_MLA_HEAD)
    assert (lse is None) is (stub is AITER_MLA_0_1_7)


def test_more_heads_than_the_kernels_have() -> None:
    with (
        stub_vendor(AITER_MLA_HEAD),
        pytest.raises(UnsupportedOptionError, match=r"num_heads=256 .*16 or 128 heads; allowed"),
    ):
        AiterMLACall(layer_of(256), 512)


def test_the_kernel_refuses_eight_heads_that_were_not_padded() -> None:
    lens = torch.tensor([3], dtype=torch.int32)
    step = step_of(torch.zeros(1, 1, dtype=torch.int32), torch.tensor([0, 1]).int(), lens)
    with (
        stub_vendor(AITER_MLA_HEAD),
        pytest.raises(RuntimeError, match="nhead=8 and max_seqlen_q=1 not supported"),
    ):
        aiter_mla.decode()(
            q=torch.zeros(1, 8, 576, dtype=torch.bfloat16),
            kv_buffer=torch.zeros(BLOCK, 1, 1, 576, dtype=torch.bfloat16),
            o=torch.zeros(1, 8, 512, dtype=torch.bfloat16),
            qo_indptr=step.query_start_loc,
            kv_indptr=step.key_start_loc,
            kv_indices=step.slots,
            kv_last_page_lens=step.last_page_lens,
            max_seqlen_q=1,
        )


def test_slots_of_all_keys_in_a_row() -> None:
    table = torch.tensor([[3, 1], [9, 9], [0, 7]], dtype=torch.int32)
    lens, starts = torch.tensor([17, 0, 2]).int(), torch.arange(4).int()
    step = step_of(table, starts, lens)
    assert step.slots.dtype is torch.int32
    assert step.key_start_loc.tolist() == [0, 17, 18, 20]
    assert step.slots.tolist() == [*range(48, 64), 16, 0, 0, 1]
    assert step.keyless is not None
    assert step.keyless.requests.tolist() == [False, True, False]


def test_nothing_is_kept_or_set_where_all_requests_have_keys() -> None:
    table, starts = torch.zeros(2, 1, dtype=torch.int32), torch.arange(3).int()
    assert step_of(table, starts, torch.tensor([1, 9]).int()).keyless is None


def test_captured_sizes_share_a_buffer_of_slots() -> None:
    maker = TokenStepMaker(
        BuildConfig(max_num_seqs=4, max_model_len=64, capture_sizes=(2, 3)),
        torch.device("cpu"),
        BLOCK,
    )
    steps = []
    for lens in ([5, 40, 1], [30, 2], [64, 64, 64]):
        starts = torch.arange(len(lens) + 1).int()
        common = CommonAttentionMetadata.from_lengths(
            query_lens=[1] * len(lens),
            seq_lens=lens,
            block_table=torch.arange(4 * len(lens), dtype=torch.int32).view(-1, 4),
            block_size=BLOCK,
        )
        steps.append(maker.make(common))
        assert len(steps[-1].slots) == sum(lens)
        assert steps[-1].query_start_loc.equal(starts)
    assert len({step.slots.data_ptr() for step in steps}) == 1
    assert steps[0].key_start_loc.data_ptr() == steps[2].key_start_loc.data_ptr()
    assert steps[2].slots.tolist() == list(range(192))


def test_blocks_that_lie_apart() -> None:
    cache = torch.zeros(2, BLOCK + 1, 576, dtype=torch.bfloat16)[:, :BLOCK]
    lens = torch.tensor([3], dtype=torch.int32)
    step = step_of(torch.zeros(1, 1, dtype=torch.int32), torch.tensor([0, 1]).int(), lens)
    query = torch.zeros(1, 16, 576, dtype=torch.bfloat16)
    with (
        stub_vendor(AITER_MLA_HEAD),
        pytest.raises(UnsupportedOptionError, match=r"strides \(9792, 576, 1\) .*a dense one"),
    ):
        AiterMLACall(layer_of(16), 512)(query, cache, step)


@pytest.mark.parametrize(
    ("num_heads", "kernel", "why"),
    [
        (8, "16 heads", "8 heads, padded to the kernel's 16"),
        (128, "128 heads", "128 heads, as the kernel has"),
    ],
)
def test_it_says_what_decodes(num_heads: int, kernel: str, why: str) -> None:
    dims = MLADims()
    request = AttentionRequest(
        num_heads=num_heads, num_kv_heads=1, head_size=dims.latent_size, mla=dims
    )
    (path,) = AiterMLABackend.kernel_paths(request, preset("mi300x"), Inventory())
    assert kernel in path.kernel
    assert why in path.why
