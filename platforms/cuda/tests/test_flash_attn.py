"""FLASH_ATTN's layers: what they resolve to, deliver, refuse, and say of themselves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from fa_testing import H200, build_of, common_of, inventory, layer_object, layer_spec, stubbed

from attn_conformance.stubs.recorder import Recorder
from attn_cuda import _fa_loaded
from attn_cuda.backends.flash_attn import (
    FlashAttnBackend,
    FlashAttnDiffKVBackend,
    FlashAttnImpl,
    FlashAttnMetadata,
    FlashAttnMetadataBuilder,
)
from attn_shared.errors import InvalidInputError, UnsupportedOptionError, VendorMissingError
from attn_shared.layer import Attention
from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.registry import DEFAULT_REGISTRY
from attn_shared.request import AttentionRequest
from attn_shared.selection import VerdictStatus
from attn_shared.selector import DEFAULT_SELECTOR
from attn_shared.spec import BuildConfig, LayerSpec

CPU = torch.device("cpu")


@pytest.fixture
def third() -> Iterator[Recorder]:
    with stubbed("vllm_flash_attn_3") as (recorder, _):
        yield recorder


def planned(spec: LayerSpec, query_lens: list[int], seq_lens: list[int]) -> FlashAttnMetadata:
    builder = FlashAttnMetadataBuilder(spec.kv_cache_spec, {"layer": spec}, BuildConfig(), CPU)
    return builder.build(0, common_of(query_lens, seq_lens))


def cache_of(spec: LayerSpec, num_blocks: int = 8) -> Any:
    assert spec.kv_cache_spec is not None
    return spec.kv_cache_spec.allocate(num_blocks, "cpu")  # type: ignore[attr-defined]


def query_of(rows: int) -> torch.Tensor:
    return torch.randn(rows, 4, 16).bfloat16()


def test_both_names_are_registered() -> None:
    assert DEFAULT_REGISTRY.load("FLASH_ATTN") is FlashAttnBackend
    assert DEFAULT_REGISTRY.load("FLASH_ATTN_DIFFKV") is FlashAttnDiffKVBackend
    assert FlashAttnDiffKVBackend.get_impl_cls() is FlashAttnImpl


def test_a_layer_says_what_runs_and_who_writes(third: Recorder) -> None:
    assert repr(FlashAttnImpl(layer_spec())) == (
        "FlashAttnImpl(FlashAttention 3 of vllm_flash_attn_3 0.25.1, cache written by torch)"
    )


def test_a_library_that_stopped_loading_is_named() -> None:
    _fa_loaded.forget()
    with pytest.raises(VendorMissingError, match="flash_attn_3 does not load") as caught:
        FlashAttnBackend.load_vendor(H200, inventory(flash_attn_3=build_of()))
    assert caught.value.library == "flash_attn_3"
    _fa_loaded.forget()


def test_a_step_without_tokens_calls_no_kernel(third: Recorder) -> None:
    spec = layer_spec()
    metadata = planned(spec, [0, 0], [5, 2])
    output = torch.full((3, 4, 16), 7.0).bfloat16()
    impl = FlashAttnImpl(spec)
    query = query_of(3)
    assert impl.forward(layer_object(), query, None, None, cache_of(spec), metadata, output) is (
        output
    )
    result = impl.forward(layer_object(), query, None, None, cache_of(spec), metadata)
    assert result.shape == output.shape
    assert third.of("flash_attn_varlen_func") == []


def test_padding_rows_of_flash_attention_2_are_not_handed_over() -> None:
    with stubbed("vllm_flash_attn_2") as (recorder, _):
        spec = layer_spec()
        metadata = planned(spec, [1, 1], [5, 9])
        impl = FlashAttnImpl(spec)
        result = impl.forward(layer_object(), query_of(4), None, None, cache_of(spec), metadata)
        assert result.shape == (4, 4, 16)
        assert len(recorder.calls[-1].arguments["q"]) == 2


def test_an_output_that_no_kernel_can_write_is_copied_to(third: Recorder) -> None:
    spec = layer_spec()
    wide = torch.zeros(2, 4, 17).bfloat16()
    impl, metadata = FlashAttnImpl(spec), planned(spec, [1, 1], [5, 9])
    cache, query = cache_of(spec).fill_(1.0), query_of(2)
    result = impl.forward(layer_object(), query, None, None, cache, metadata, wide[..., :16])
    assert third.calls[-1].arguments["out"] is None
    assert result.data_ptr() == wide.data_ptr()
    assert (wide[..., :16] == 1.0).all()
    assert (wide[..., 16] == 0.0).all()


def test_a_second_cache_of_the_same_layer_is_read_and_checked(third: Recorder) -> None:
    spec = layer_spec()
    impl, metadata, query = FlashAttnImpl(spec), planned(spec, [1], [5]), query_of(1)
    for value in (1.0, 2.0):
        cache = cache_of(spec).fill_(value)
        for _ in range(2):
            result = impl.forward(layer_object(), query, None, None, cache, metadata)
            assert (result == value).all()
    wrong = torch.zeros(8, 2, 16, 2, 24).bfloat16()
    with pytest.raises(InvalidInputError, match="kv_cache shape"):
        impl.forward(layer_object(), query, None, None, wrong, metadata)


def test_a_cache_is_not_kept_alive_by_a_layer(third: Recorder) -> None:
    spec = layer_spec()
    impl, metadata = FlashAttnImpl(spec), planned(spec, [1], [5])
    cache = cache_of(spec)
    impl.forward(layer_object(), query_of(1), None, None, cache, metadata)
    assert impl._views.cache() is cache
    third.calls.clear()
    del cache
    assert impl._views.cache() is None


def test_metadata_of_another_build_is_refused(third: Recorder) -> None:
    spec = layer_spec()
    impl, metadata = FlashAttnImpl(spec), planned(spec, [1], [5])
    other = replace(metadata, provider=replace(metadata.provider, version=2))
    arguments = (layer_object(), query_of(1), None, None, cache_of(spec))
    with pytest.raises(InvalidInputError, match=r"made for FlashAttention 2.*FlashAttention 3"):
        impl.forward(*arguments, other)
    with pytest.raises(InvalidInputError, match="metadata is a object"):
        impl.forward(*arguments, object())  # type: ignore[arg-type]


def test_a_block_stride_that_kernels_cannot_load_is_refused(third: Recorder) -> None:
    with pytest.raises(UnsupportedOptionError, match=r"page_size_padded=2056.*multiple of 16"):
        FlashAttnImpl(layer_spec(cache={"page_size_padded": 2056}))
    FlashAttnImpl(layer_spec(cache={"page_size_padded": 2064}))


def test_an_fp8_cache_of_the_other_flavour_is_refused(third: Recorder) -> None:
    cache = {"dtype": torch.float8_e4m3fnuz, "kv_cache_dtype": "fp8"}
    with pytest.raises(UnsupportedOptionError, match=r"allowed: torch\.float8_e4m3fn"):
        FlashAttnImpl(layer_spec(cache=cache))


def test_the_cache_is_written_as_the_layer_says(third: Recorder) -> None:
    spec = layer_spec()
    impl, cache = FlashAttnImpl(spec), cache_of(spec)
    rows = torch.ones(2, 2, 16).bfloat16()
    slots = torch.tensor([3, -1])
    impl.do_kv_cache_update(layer_object(), rows, rows, cache, slots)
    assert cache.sum().item() == 2 * 2 * 16
    with pytest.raises(InvalidInputError, match="key dtype"):
        impl.do_kv_cache_update(layer_object(), rows.float(), rows, cache, slots)


@pytest.mark.parametrize(("scale", "sign"), [(-0.5, -1.0), (0.0, 0.0)])
def test_a_scale_that_is_not_positive_goes_to_the_query(
    third: Recorder, scale: float, sign: float
) -> None:
    spec = layer_spec(scale=scale)
    query = query_of(1)
    metadata = planned(spec, [1], [5])
    FlashAttnImpl(spec).forward(layer_object(), query, None, None, cache_of(spec), metadata)
    call = third.calls[-1]
    assert call.arguments["softmax_scale"] == (0.5 if scale else 1.0)
    assert torch.equal(call.arguments["q"], query * sign)


def test_an_lse_of_capped_logits_is_refused(third: Recorder) -> None:
    spec = layer_spec(softcap=2.0)
    arguments = (layer_object(), query_of(1), None, None, cache_of(spec), planned(spec, [1], [5]))
    with pytest.raises(UnsupportedOptionError, match=r"softcap=2\.0"):
        FlashAttnImpl(spec).forward(*arguments, lse=torch.empty(4, 1))
    FlashAttnImpl(spec).forward(*arguments)


@pytest.mark.cuda(min_capability=(8, 0))
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_step_is_built_and_run_without_waiting_for_the_device() -> None:
    request = AttentionRequest(num_heads=8, num_kv_heads=2, head_size=64)
    verdict = DEFAULT_SELECTOR.resolve(request).verdict("FLASH_ATTN")
    if verdict.status is VerdictStatus.UNAVAILABLE:
        pytest.skip(f"FLASH_ATTN: {verdict.detail}")
    layer = Attention(
        num_heads=8, num_kv_heads=2, head_size=64, device="cuda", backend="FLASH_ATTN"
    )
    cache = layer.allocate(8)
    table = torch.arange(8, dtype=torch.int32, device="cuda").reshape(2, 4)
    common = CommonAttentionMetadata.from_lengths(
        query_lens=[1, 3], seq_lens=[5, 9], block_table=table, block_size=16, device="cuda"
    )
    query = torch.randn(4, 8, 64, dtype=torch.bfloat16, device="cuda")
    key, value = torch.ones(2, 4, 2, 64, dtype=torch.bfloat16, device="cuda")
    layer.forward(query, key, value, cache, layer.plan(common))  # what happens once may wait
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer.forward(query, key, value, cache, layer.plan(common))
    finally:
        torch.cuda.set_sync_debug_mode(before)
