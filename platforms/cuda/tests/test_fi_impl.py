"""What one layer does beside its plans: fresh keys, sinks, caches of 4 bits, and refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fa_testing import common_of, layer_object
from fi_testing import B200, fi_layer, fi_stubbed
from torch import Tensor

from attn_cuda._fi_impl import FlashInferImpl
from attn_cuda._fi_metadata import FlashInferMetadataBuilder
from attn_cuda._fi_trtllm_metadata import FlashInferTrtllmMetadataBuilder
from attn_cuda.backends.flashinfer_trtllm import FlashInferTrtllmBackend, FlashInferTrtllmImpl
from attn_shared import reference
from attn_shared.errors import InvalidRequestError, UnsupportedOptionError
from attn_shared.kv_cache import FullAttentionSpec, NVFP4AttentionSpec
from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.nvfp4 import dequantize_nvfp4
from attn_shared.request import AttentionRequest
from attn_shared.spec import BuildConfig, LayerSpec

CPU = torch.device("cpu")


def tensors(spec: LayerSpec, common: CommonAttentionMetadata, seed: int = 0) -> list[Tensor]:
    """Return query, and keys and values of every position of every request in its blocks."""
    generator = torch.Generator().manual_seed(seed)
    count = common.num_reqs * common.max_seq_len
    shapes = [(common.num_actual_tokens, spec.num_heads), *([(count, spec.num_kv_heads)] * 2)]
    return [torch.randn(*shape, 64, generator=generator).bfloat16() for shape in shapes]


def written(impl: FlashInferImpl, layer: Any, common: CommonAttentionMetadata) -> list[Tensor]:
    """Return query and a cache in which every request's positions are written."""
    spec, table = impl.spec.kv_cache_spec, common.block_table
    assert spec is not None
    assert table is not None
    query, key, value = tensors(impl.spec, common)
    cache = spec.allocate(int(table.max()) + 1, "cpu")  # type: ignore[attr-defined]
    positions = torch.arange(common.max_seq_len)
    slots = table[:, positions // 16].long() * 16 + positions % 16
    impl.do_kv_cache_update(layer, key, value, cache, slots.flatten())
    return [query, cache]


def test_fresh_rows_are_read_from_the_call_and_from_pages_where_it_brings_none() -> None:
    common, spec = common_of([20, 30], [20, 30]), fi_layer()
    with fi_stubbed() as (recorder, _):
        impl = FlashInferImpl(spec)
        builder = FlashInferMetadataBuilder(spec.kv_cache_spec, {"": spec}, BuildConfig(), CPU)
        metadata = builder.build(0, common)
        layer = layer_object()
        query, cache = written(impl, layer, common)
        table = common.block_table
        assert table is not None
        views = spec.kv_cache_spec.split(cache)  # type: ignore[union-attr]
        rows = [(table[i, p // 16], p % 16) for i, n in enumerate((20, 30)) for p in range(n)]
        key, value = (torch.stack([view[b, s] for b, s in rows]) for view in views[:2])

        fresh = impl.forward(layer, query, key, value, cache, metadata)
        assert not recorder.of("BatchPrefillWithPagedKVCacheWrapper")
        alone = [impl.forward(layer, query, None, None, cache, metadata) for _ in range(2)]

        assert torch.equal(fresh, alone[0])
        assert torch.equal(fresh, alone[1])
        assert len(recorder.of("BatchPrefillWithPagedKVCacheWrapper.plan")) == 1
        assert len(recorder.of("BatchPrefillWithRaggedKVCacheWrapper.run")) == 1


@pytest.mark.parametrize(
    ("query_lens", "seq_lens"), [([1, 1], [17, 33]), ([1, 20], [5, 20])], ids=["decode", "mixed"]
)
@pytest.mark.parametrize("has_sinks", [False, True])
def test_a_cache_of_4_bits_is_read_by_its_scales(
    query_lens: list[int], seq_lens: list[int], has_sinks: bool
) -> None:
    form = NVFP4AttentionSpec(
        block_size=16,
        num_kv_heads=2,
        head_size=64,
        head_size_v=64,
        dtype=torch.uint8,
        kv_cache_dtype="nvfp4",
        layout="HND",  # type: ignore[arg-type]
    )
    spec = fi_layer(kv_cache_spec=form, has_sinks=has_sinks)
    common = common_of(query_lens, seq_lens)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0]) if has_sinks else None
    layer = layer_object(k_scale=0.5, v_scale=2.0, q_scale=0.25, sinks=sinks)
    with fi_stubbed(device=B200, backend=FlashInferTrtllmBackend):
        impl = FlashInferTrtllmImpl(spec)
        builder = FlashInferTrtllmMetadataBuilder(form, {"": spec}, BuildConfig(), CPU)
        query, cache = written(impl, layer, common)
        found = impl.forward(layer, query, None, None, cache, builder.build(0, common))

    views, table = form.split(cache), common.block_table
    assert views.key_scale is not None
    assert views.value_scale is not None
    assert table is not None
    stored = (query.float() / 0.25).to(torch.float8_e4m3fn).double() * 0.25
    expected = reference.paged_attention(
        stored,
        dequantize_nvfp4(views.key, views.key_scale, 0.5, torch.float64),
        dequantize_nvfp4(views.value, views.value_scale, 2.0, torch.float64),
        reference.AttentionOptions(scale=spec.scale, sinks=sinks),
        query_start_loc=common.query_start_loc,
        seq_lens=common.seq_lens,
        block_table=table,
        causal=True,
    )
    torch.testing.assert_close(found.double(), expected.output, rtol=2**-8, atol=1e-6)


def test_what_no_plan_serves_is_refused_by_the_layer() -> None:
    with fi_stubbed():
        for changes, words in (
            ({"has_sinks": True}, "sink=True"),
            ({"has_alibi": True}, "alibi=True"),
            ({"block_size": 15}, "block_size=15"),
            ({"window": (7, 7), "attn_type": "encoder_only", "kv_cache_spec": None}, "attn_type"),
        ):
            with pytest.raises(UnsupportedOptionError, match=words):
                FlashInferImpl(fi_layer(**changes))


def test_a_ratio_of_heads_that_is_not_whole_is_no_request() -> None:
    with pytest.raises(InvalidRequestError, match=r"num_kv_heads=4 .*divisor of num_heads=10"):
        AttentionRequest(num_heads=10, num_kv_heads=4, head_size=64)


def test_pages_that_kernels_cannot_load_are_refused() -> None:
    with fi_stubbed():
        cache = FullAttentionSpec(
            block_size=16,
            num_kv_heads=2,
            head_size=64,
            head_size_v=64,
            dtype=torch.bfloat16,
            page_size_padded=2 * 2 * 16 * 64 * 2 + 8,
        )
        with pytest.raises(UnsupportedOptionError, match=r"page_size_padded=8200 .*multiple of 16"):
            FlashInferImpl(fi_layer(kv_cache_spec=cache))


def test_an_lse_under_a_cap_is_refused() -> None:
    spec = fi_layer(softcap=30.0)
    with fi_stubbed():
        impl = FlashInferImpl(spec)
        builder = FlashInferMetadataBuilder(spec.kv_cache_spec, {"": spec}, BuildConfig(), CPU)
        common, layer = common_of([1], [17]), layer_object()
        query, cache = written(impl, layer, common)
        lse = torch.empty(4, 1)
        with pytest.raises(UnsupportedOptionError, match=r"lse is given with softcap=30\.0"):
            impl.forward(layer, query, None, None, cache, builder.build(0, common), lse=lse)
