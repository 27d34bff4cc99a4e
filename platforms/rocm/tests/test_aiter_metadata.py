"""Both builders: decodes apart from prompts, bounds, requests without keys, captured batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from aiter_testing import HEAD, WHEEL, common_of, layer_spec, stubbed

from attn_rocm._aiter_metadata import AiterFlashMetadataBuilder
from attn_rocm._aiter_unified import AiterUnifiedMetadataBuilder
from attn_rocm.backends.rocm_aiter_fa import AiterFlashImpl
from attn_rocm.backends.rocm_aiter_unified_attn import AiterUnifiedImpl
from attn_shared.backend import AttentionCGSupport
from attn_shared.errors import InvalidInputError, MetadataError, UnsupportedOptionError
from attn_shared.request import AttentionType
from attn_shared.spec import BuildConfig, LayerSpec

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def wheel() -> Iterator[None]:
    with stubbed(WHEEL):
        yield


def flash(*layers: LayerSpec, **config: Any) -> AiterFlashMetadataBuilder:
    layers = layers or (layer_spec(),)
    named = {f"layer {index}": layer for index, layer in enumerate(layers)}
    return AiterFlashMetadataBuilder(layers[0].kv_cache_spec, named, BuildConfig(**config), CPU)


def unified(**config: Any) -> AiterUnifiedMetadataBuilder:
    spec = layer_spec()
    named = {"layer": spec}
    return AiterUnifiedMetadataBuilder(spec.kv_cache_spec, named, BuildConfig(**config), CPU)


def test_leading_single_queries_go_apart_from_the_rest() -> None:
    metadata = flash().build(0, common_of([1, 1, 3, 1], [20, 7, 33, 9]))
    decode, rest = metadata.decode, metadata.rest
    assert decode is not None
    assert rest is not None
    assert (decode.num_reqs, decode.key_lens.tolist(), decode.max_key_len) == (2, [20, 7], 33)
    assert decode.block_table.is_contiguous()
    assert (rest.first_row, rest.query_start_loc.tolist()) == (2, [0, 3, 4])
    assert rest.key_lens is not None
    assert (rest.key_lens.tolist(), rest.num_keys) == ([33, 9], 42)
    assert (metadata.whole.num_keys, metadata.whole.query_start_loc.tolist()[-1]) == (69, 6)


def test_a_batch_of_single_queries_has_no_rest_and_one_of_prompts_no_decodes() -> None:
    metadata = flash().build(0, common_of([1, 1], [20, 7]))
    assert metadata.rest is None
    metadata = flash().build(0, common_of([3, 2], [20, 7]))
    assert metadata.decode is None
    assert metadata.rest is not None
    assert metadata.rest.query_start_loc is metadata.whole.query_start_loc


def test_layers_that_decode_otherwise_are_not_split() -> None:
    metadata = flash(layer_spec(window=(7, 0))).build(0, common_of([1, 3], [20, 33]))
    assert (metadata.decode, metadata.rest) == (None, None)
    mixed = flash(layer_spec(), layer_spec(window=(7, 0))).build(0, common_of([1, 3], [20, 33]))
    assert mixed.decode is not None
    assert mixed.whole.num_keys == 53


def test_bounds_are_never_below_2() -> None:
    whole = flash().build(0, common_of([1], [1])).whole
    assert (whole.max_query_len, whole.max_key_len) == (2, 2)


def test_keys_of_the_call_serve_where_the_host_knows_that_they_are_all() -> None:
    assert flash().build(0, common_of([3, 2], [3, 2])).whole.brings_keys
    assert not flash().build(0, common_of([3, 2], [3, 4])).whole.brings_keys
    unsure = common_of([3, 2], [3, 2], seq_lens_cpu_is_exact=False)
    assert not flash().build(0, unsure).whole.brings_keys
    rest = flash().build(0, common_of([1, 3], [20, 3])).rest
    assert rest is not None
    assert rest.brings_keys


def test_requests_without_keys_are_decoded_over_one_and_set_afterwards() -> None:
    common = common_of([1, 1, 1], [20, 0, 0])
    metadata = flash().build(0, common)
    assert metadata.decode is not None
    assert metadata.decode.key_lens.tolist() == [20, 1, 1]
    assert metadata.decode.block_table.tolist()[1:] == [[0, 0], [0, 0]]
    assert metadata.whole.keyless is not None
    assert metadata.whole.keyless.rows.tolist() == [False, True, True]
    built = unified().build(0, common)
    assert built.key_lens.tolist() == [20, 1, 1]
    assert common.seq_lens.tolist() == [20, 0, 0]


def test_exact_lengths_on_the_host_rule_such_requests_out() -> None:
    assert flash().build(0, common_of([1, 1], [20, 1])).whole.keyless is None
    assert unified().build(0, common_of([1, 1], [20, 1])).keyless is None
    unsure = common_of([1, 1], [20, 1], seq_lens_cpu_is_exact=False)
    assert flash().build(0, unsure).whole.keyless is not None


def test_a_captured_decode_stays_where_it_is_and_within_its_bounds() -> None:
    builder = flash(capture_sizes=(2,))
    first = builder.build_for_cudagraph_capture(common_of([1, 1], [600, 600])).decode
    second = builder.build(0, common_of([1, 1], [20, 0])).decode
    assert first is not None
    assert second is not None
    assert second.max_key_len == first.max_key_len == 600
    assert second.workspace.data_ptr() == first.workspace.data_ptr()
    assert second.key_lens.data_ptr() == first.key_lens.data_ptr()


def test_a_prefill_by_places_is_not_captured_with_the_remedy() -> None:
    windowed = layer_spec(window=(7, 0))
    with pytest.raises(UnsupportedOptionError, match="a block table, blocks of 16, and heads of"):
        flash(windowed).build_for_cudagraph_capture(common_of([1, 1], [20, 20]))
    with stubbed(HEAD):
        captured = flash(windowed).build_for_cudagraph_capture(common_of([1, 1], [20, 20]))
    assert captured.whole.max_key_len == 20


def test_what_graphs_may_hold() -> None:
    spec = layer_spec().kv_cache_spec
    single = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    assert AiterFlashMetadataBuilder.get_cudagraph_support(BuildConfig(), spec) is single
    always = AttentionCGSupport.ALWAYS
    assert AiterUnifiedMetadataBuilder.get_cudagraph_support(BuildConfig(), spec) is always


def test_the_unified_call_is_told_single_rows_only_where_each_request_has_its_own() -> None:
    builder = unified()
    assert builder.build(0, common_of([1, 1], [20, 7])).max_query_len == 1
    assert builder.build(0, common_of([1, 0], [20, 7])).max_query_len == 2
    assert builder.build(0, common_of([1, 3], [20, 7])).max_query_len == 3


def test_cross_attention_counts_the_encoders_keys() -> None:
    layer = layer_spec(attn_type=AttentionType.ENCODER_DECODER)
    lens = torch.tensor([9, 30], dtype=torch.int32)
    common = common_of([1, 2], [20, 33]).with_fields(
        encoder_seq_lens=lens, encoder_seq_lens_cpu=lens, causal=False
    )
    whole = flash(layer).build(0, common).whole
    assert whole.key_lens is lens
    assert (whole.max_key_len, whole.num_keys, whole.causal) == (30, 39, False)


def test_metadata_of_another_builder_or_release_is_refused() -> None:
    spec = layer_spec()
    query = torch.zeros(2, 4, 64, dtype=torch.bfloat16)
    common = common_of([1, 1], [20, 7])
    own, other = flash().build(0, common), unified().build(0, common)
    for impl, wrong in ((AiterFlashImpl(spec), other), (AiterUnifiedImpl(spec), own)):
        with pytest.raises(InvalidInputError, match=r"metadata is a .*; allowed: an Aiter"):
            impl.forward(None, query, None, None, None, wrong)  # type: ignore[arg-type]
    with stubbed(HEAD), pytest.raises(InvalidInputError, match=r"made for aiter 0\.1\.7"):
        AiterFlashImpl(spec).forward(None, query, None, None, None, own)  # type: ignore[arg-type]


@pytest.mark.parametrize("build", [flash, unified])
def test_a_batch_without_a_table_is_refused(build: Any) -> None:
    with pytest.raises(MetadataError, match="block_table"):
        build().build(0, common_of([1], [20]).with_fields(block_table=None))
