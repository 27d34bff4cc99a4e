"""How a batch is cut: decodes first, fresh rows, windows, graphs, and what a group must share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fa_testing import common_of
from fi_testing import B200, fi_layer, fi_stubbed

from attn_cuda import _fi_loaded
from attn_cuda._fi_direct import DirectPart
from attn_cuda._fi_metadata import FlashInferMetadata, FlashInferMetadataBuilder
from attn_cuda._fi_parts import CascadePart, FreshPart, PlannedPart
from attn_cuda._fi_trtllm_metadata import FlashInferTrtllmMetadataBuilder
from attn_cuda.backends.flashinfer import FlashInferImpl
from attn_cuda.backends.flashinfer_trtllm import FlashInferTrtllmBackend
from attn_shared.backend import AttentionCGSupport
from attn_shared.errors import (
    InvalidInputError,
    MetadataError,
    UnsupportedOptionError,
    VendorMissingError,
)
from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.spec import BuildConfig, LayerSpec

CPU = torch.device("cpu")


def builder_of(
    kind: type[FlashInferMetadataBuilder] = FlashInferMetadataBuilder,
    config: BuildConfig | None = None,
    **layers: LayerSpec,
) -> FlashInferMetadataBuilder:
    layers = layers or {"layer": fi_layer()}
    spec = next(iter(layers.values())).kv_cache_spec
    return kind(spec, layers, config or BuildConfig(), CPU)


def shapes(metadata: FlashInferMetadata) -> list[tuple[type, int, int]]:
    return [
        (type(part), getattr(part, "first", 0), getattr(part, "last", -1))
        for part in metadata.parts
    ]


@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "expected"),
    [
        ([1, 1], [5, 9], [(PlannedPart, 0, 2)]),
        ([1, 1, 3], [5, 9, 40], [(PlannedPart, 0, 2), (PlannedPart, 2, 5)]),
        ([3, 1], [40, 9], [(PlannedPart, 0, 4)]),
        ([1, 0, 0], [5, 0, 0], [(PlannedPart, 0, 1)]),
        ([1, 20], [5, 20], [(PlannedPart, 0, 1), (FreshPart, 1, 21)]),
        ([20, 30], [20, 30], [(FreshPart, 0, 50)]),
        ([20, 30], [20, 31], [(PlannedPart, 0, 50)]),
        ([16, 16], [16, 16], [(PlannedPart, 0, 32)]),
        ([0], [0], []),
    ],
    ids=["decode", "mixed", "disordered", "padding", "fresh", "prompts", "extend", "few", "empty"],
)
def test_a_batch_is_cut_at_its_first_longer_row(
    query_lens: list[int], seq_lens: list[int], expected: list[tuple[type, int, int]]
) -> None:
    with fi_stubbed():
        metadata = builder_of().build(0, common_of(query_lens, seq_lens))
        assert shapes(metadata) == expected
        assert metadata.num_actual_tokens == sum(query_lens)


def test_rows_without_a_causal_mask_are_one_prefill() -> None:
    with fi_stubbed() as (recorder, _):
        metadata = builder_of().build(0, common_of([1, 20], [5, 20], causal=False))
        assert shapes(metadata) == [(PlannedPart, 0, 21)]
        (plan,) = recorder.of("BatchPrefillWithPagedKVCacheWrapper.plan")
    assert plan.arguments["causal"] is False


@pytest.mark.parametrize(
    ("device", "changes", "query_len", "expected"),
    [
        (None, {}, 17, "fa3"),
        (None, {}, 16, "fa2"),
        (None, {"cache": {"dtype": torch.float8_e4m3fn, "kv_cache_dtype": "fp8"}}, 17, "fa2"),
        (B200, {}, 17, "fa2"),
    ],
    ids=["hopper", "few-rows", "fp8", "blackwell"],
)
def test_hoppers_kernels_prefill_where_rows_are_many_and_the_cache_is_plain(
    device: Any, changes: dict[str, Any], query_len: int, expected: str
) -> None:
    with fi_stubbed(**({} if device is None else {"device": device})) as (recorder, _):
        builder_of(layer=fi_layer(**changes)).build(0, common_of([query_len], [40]))
        (wrapper,) = recorder.of("BatchPrefillWithPagedKVCacheWrapper")
    assert wrapper.arguments["backend"] == expected


def test_ranks_that_share_a_sequence_get_the_kernels_that_have_an_lse_at_once() -> None:
    layer = fi_layer(num_heads=8, dcp_size=2)
    with fi_stubbed() as (recorder, _):
        metadata = builder_of(layer=layer).build(0, common_of([1, 3], [40, 3]))
        (decode,) = recorder.of("BatchDecodeWithPagedKVCacheWrapper")
        (prefill,) = recorder.of("BatchPrefillWithPagedKVCacheWrapper")
    assert (decode.arguments["use_tensor_cores"], prefill.arguments["backend"]) == (False, "fa3")
    assert [part.with_lse for part in metadata.parts] == [None, None]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "ours", "theirs"),
    [
        ("window", (None, None), (7, 0)),
        ("softcap", None, 30.0),
        ("scale", 0.25, 0.5),
    ],
)
def test_layers_of_one_plan_agree_or_are_refused_with_both_values(
    name: str, ours: object, theirs: object
) -> None:
    with fi_stubbed(), pytest.raises(UnsupportedOptionError) as caught:
        builder_of(first=fi_layer(), second=fi_layer(**{name: theirs}))
    for words in (f"agree on {name}", f"first has {ours}", f"second has {theirs}"):
        assert words in str(caught.value)


def test_what_the_plan_is_told() -> None:
    layer = fi_layer(window=(7, 0), softcap=30.0, scale=-0.5)
    with fi_stubbed() as (recorder, _):
        builder_of(layer=layer).build(0, common_of([1], [40]))
        (plan,) = recorder.of("BatchDecodeWithPagedKVCacheWrapper.plan")
    told = plan.arguments
    names = ("window_left", "logits_soft_cap", "sm_scale", "page_size", "q_data_type")
    assert [told[name] for name in names] == [7, 30.0, 0.5, 16, torch.bfloat16]
    assert told["seq_lens"].tolist() == [40]


def test_lengths_that_are_bounds_and_modes_that_are_not_served_are_refused() -> None:
    with fi_stubbed():
        bounds = common_of([1], [40], seq_lens_cpu_is_exact=False)
        with pytest.raises(MetadataError, match=r"seq_lens_cpu .*an upper bound"):
            builder_of().build(0, bounds)
        with pytest.raises(UnsupportedOptionError, match="batch_invariant=True"):
            builder_of(config=BuildConfig(batch_invariant=True))
        with pytest.raises(UnsupportedOptionError, match="common_prefix_len=16 with a window of 8"):
            builder_of(layer=fi_layer(window=(7, 0))).build(16, sharing())


def test_a_captured_size_is_planned_into_its_buffers_within_what_was_promised() -> None:
    config = BuildConfig(capture_sizes=(2,), max_model_len=64)
    with fi_stubbed() as (recorder, _):
        builder = builder_of(config=config)
        for lens in ([5, 40], [64, 64], [1, 0]):
            builder.build(0, common_of([1, 1], lens))
        builder.build(0, common_of([1], [5]))
        made = recorder.of("BatchDecodeWithPagedKVCacheWrapper")
        with pytest.raises(
            MetadataError, match=r"pages of a captured batch .*10.*at most 8: 2 req"
        ):
            builder.build(0, common_of([1, 1], [80, 80]))
    assert [call.arguments["use_cuda_graph"] for call in made] == [True, False]


def test_a_prefix_is_one_wrapper_of_two_levels() -> None:
    with fi_stubbed() as (recorder, _):
        metadata = builder_of().build(16, sharing())
        assert shapes(metadata) == [(CascadePart, 0, -1)]
        (plan,) = recorder.of("MultiLevelCascadeAttentionWrapper.plan")
    arrays = [[item.tolist() for item in plan.arguments[name]] for name in CASCADE]
    assert arrays == [
        [[0, 3], [0, 1, 3]],
        [[0, 1], [0, 2, 5]],
        [[0], [1, 2, 5, 6, 7]],
        [[16], [8, 2]],
    ]


def sharing() -> CommonAttentionMetadata:
    """Return two requests whose first block is one."""
    common = common_of([1, 2], [40, 50])
    table = common.block_table
    assert table is not None
    table[1, 0] = table[0, 0]
    return common


CASCADE = ("qo_indptr_arr", "paged_kv_indptr_arr", "paged_kv_indices_arr", "paged_kv_last_page_len")


def test_graph_levels() -> None:
    config = BuildConfig()
    single, uniform = (
        AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE,
        AttentionCGSupport.UNIFORM_BATCH,
    )
    native, direct = FlashInferMetadataBuilder, FlashInferTrtllmMetadataBuilder
    _fi_loaded.forget()
    assert direct.get_cudagraph_support(config, None) is single
    with fi_stubbed(backend=FlashInferTrtllmBackend):
        assert native.get_cudagraph_support(config, None) is single
        assert direct.get_cudagraph_support(config, None) is single
    with fi_stubbed(device=B200, backend=FlashInferTrtllmBackend):
        assert native.get_cudagraph_support(config, None) is single
        assert direct.get_cudagraph_support(config, None) is uniform


def test_drafts_are_decodes_on_blackwell_alone() -> None:
    config, common = BuildConfig(num_spec_tokens=2), common_of([3, 3], [40, 9])
    with fi_stubbed(device=B200, backend=FlashInferTrtllmBackend):
        builder = builder_of(FlashInferTrtllmMetadataBuilder, config)
        assert builder.reorder_batch_threshold == 3
        (part,) = builder.build(0, common).parts
        assert isinstance(part, DirectPart)
        assert (part.kernels, part.queries_per_request) == ("trtllm-gen", 3)
    with fi_stubbed(backend=FlashInferTrtllmBackend):
        builder = builder_of(FlashInferTrtllmMetadataBuilder, config)
        assert builder.reorder_batch_threshold == 1
        assert shapes(builder.build(0, common)) == [(PlannedPart, 0, 6)]


def test_metadata_of_another_backend_or_plan_is_refused() -> None:
    query = torch.zeros(1, 4, 64, dtype=torch.bfloat16)
    with fi_stubbed(backend=FlashInferTrtllmBackend):
        impl = FlashInferImpl(fi_layer())
        theirs = builder_of(FlashInferTrtllmMetadataBuilder).build(0, common_of([1], [5]))
        other = builder_of(layer=fi_layer(scale=0.5)).build(0, common_of([1], [5]))
        for metadata, words in ((theirs, "FLASHINFER_TRTLLM planned for"), (other, "scale=0.5")):
            with pytest.raises(InvalidInputError, match=words):
                impl.forward(None, query, None, None, None, metadata)  # type: ignore[arg-type]


def test_nothing_works_before_the_library_is_loaded() -> None:
    _fi_loaded.forget()
    with pytest.raises(VendorMissingError, match="FLASHINFER is not loaded"):
        builder_of()
    with pytest.raises(VendorMissingError, match="FLASHINFER is not loaded"):
        FlashInferImpl(fi_layer())
