"""FLASH_ATTN's builder: bounds and splits, addresses for graphs, prefixes, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fa_testing import H200, build_of, common_of, inventory, layer_spec, request, stubbed

from attn_conformance.stubs.recorder import Recorder
from attn_cuda import _fa_loaded
from attn_cuda._fa_metadata import FlashAttnMetadataBuilder
from attn_shared.backend import AttentionCGSupport
from attn_shared.errors import MetadataError, UnsupportedOptionError
from attn_shared.request import AttentionType
from attn_shared.spec import BuildConfig, LayerSpec

CPU = torch.device("cpu")


@pytest.fixture
def third() -> Iterator[Recorder]:
    with stubbed("vllm_flash_attn_3") as (recorder, _):
        yield recorder


@pytest.fixture
def second() -> Iterator[Recorder]:
    with stubbed("vllm_flash_attn_2") as (recorder, _):
        yield recorder


def builder(*layers: LayerSpec, **config: Any) -> FlashAttnMetadataBuilder:
    layers = layers or (layer_spec(),)
    named = {f"layer {index}": layer for index, layer in enumerate(layers)}
    return FlashAttnMetadataBuilder(layers[0].kv_cache_spec, named, BuildConfig(**config), CPU)


def test_a_step_says_what_the_batch_says(third: Recorder) -> None:
    common = common_of([1, 3], [20, 33])
    metadata = builder().build(0, common)
    step = metadata.step
    assert (step.max_query_len, step.max_key_len, step.causal, step.num_reqs) == (3, 33, True, 2)
    assert step.key_lens is common.seq_lens
    assert step.block_table is common.block_table
    assert step.query_start_loc is common.query_start_loc
    assert (step.key_start_loc, metadata.num_keys, metadata.num_actual_tokens) == (None, 0, 4)


def test_a_schedule_is_made_once_for_all_layers(third: Recorder) -> None:
    metadata = builder(layer_spec(), layer_spec(scale=0.5)).build(0, common_of([1, 1], [5, 40]))
    (call,) = third.of("get_scheduler_metadata")
    assert metadata.step.schedule is not None
    assert call.arguments["max_seqlen_k"] == metadata.step.max_key_len
    assert call.arguments["num_splits"] == metadata.step.num_splits
    assert call.arguments["window_size"] == (-1, -1)
    assert call.arguments["qkv_dtype"] is torch.bfloat16
    assert call.positional == ()


def test_the_schedule_of_an_fp8_cache_is_for_fp8(third: Recorder) -> None:
    fp8 = layer_spec(cache={"dtype": torch.float8_e4m3fn, "kv_cache_dtype": "fp8"})
    builder(fp8).build(0, common_of([1], [5]))
    assert third.of("get_scheduler_metadata")[0].arguments["qkv_dtype"] is torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("layers", "config", "build"),
    [
        ([{"window": (3, 0)}, {}], {}, {}),
        ([{"softcap": 2.0}, {}], {}, {}),
        ([{"batch_invariant": True}], {}, {}),
        ([{}], {"batch_invariant": True}, {}),
        ([{}], {}, {"fast_build": True}),
    ],
    ids=["windows", "softcaps", "invariant-layer", "invariant", "fast"],
)
def test_no_schedule_where_it_would_not_hold(
    third: Recorder,
    layers: list[dict[str, Any]],
    config: dict[str, Any],
    build: dict[str, Any],
) -> None:
    made = builder(*(layer_spec(**fields) for fields in layers), **config)
    assert made.build(0, common_of([1], [5]), **build).step.schedule is None
    assert third.of("get_scheduler_metadata") == []


def test_drafts_are_built_fast(third: Recorder) -> None:
    assert builder().build_for_drafting(common_of([1], [5]), 0).step.schedule is None


def test_keys_are_split_by_the_kernel_unless_it_must_not(third: Recorder) -> None:
    common = common_of([1] * 2, [40] * 2)
    assert builder().build(0, common).step.num_splits == 0
    assert builder(batch_invariant=True).build(0, common).step.num_splits == 1


@pytest.mark.parametrize(("num_reqs", "splits"), [(1, 32), (66, 32), (992, 32), (993, 1)])
def test_a_captured_number_of_splits_depends_on_the_size_alone(
    third: Recorder, num_reqs: int, splits: int
) -> None:
    # 2 kv heads on 132 multiprocessors: one long request alone would fill them with 66 parts. The
    # kernel cuts by length up to 992 requests, and above that all alike, which fill the device.
    made = builder(capture_sizes=(num_reqs,))
    for length in (5, 1000):
        metadata = made.build(0, common_of([1] * num_reqs, [length] * num_reqs))
        assert metadata.step.num_splits == splits


def test_query_tiles_of_a_prefill_need_no_splits(third: Recorder) -> None:
    made = builder(capture_sizes=(640,))  # 2 query heads to a kv head: 10 tiles of 128 rows
    assert made.build(0, common_of([640], [640])).step.num_splits == 6


def test_batch_invariant_steps_keep_their_causal_mask(third: Recorder) -> None:
    common = common_of([1, 1], [20, 20])
    assert builder(batch_invariant=True).build(0, common).step.max_query_len == 2
    assert builder().build(0, common).step.max_query_len == 1


def test_what_a_graph_has_read_is_refreshed_in_place(third: Recorder) -> None:
    made = builder(capture_sizes=(2,))
    common = common_of([1, 1], [5, 40])
    first = made.build_for_cudagraph_capture(common).step
    second = made.build(0, common.with_fields(max_seq_len=60)).step
    assert first.schedule is not None
    assert second.schedule is not None
    assert first.schedule.data_ptr() == second.schedule.data_ptr()


def test_a_replay_is_scheduled_with_the_bounds_of_its_capture(third: Recorder) -> None:
    made = builder(layer_spec(window=(20, 0)), capture_sizes=(2,))
    roomy = common_of([1, 1], [5, 40]).with_fields(max_seq_len=96)
    captured = made.build_for_cudagraph_capture(roomy).step
    replayed = made.build(0, common_of([1, 1], [3, 4])).step
    assert (replayed.max_query_len, replayed.max_key_len) == (1, 96)
    first, second = third.of("get_scheduler_metadata")
    bounds = ("max_seqlen_q", "max_seqlen_k", "window_size", "num_splits")
    assert [first.arguments[name] for name in bounds] == [second.arguments[name] for name in bounds]
    assert captured.max_key_len == 96


@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "bounds"),
    [
        ([1, 1, 1], [3, 4, 5], (1, 5)),
        ([2, 1], [3, 4], (2, 4)),
        ([1, 1], [3, 200], (1, 200)),
    ],
    ids=["other-size", "other-queries", "too-long"],
)
def test_batches_that_no_graph_was_captured_for_keep_their_own_bounds(
    third: Recorder, query_lens: list[int], seq_lens: list[int], bounds: tuple[int, int]
) -> None:
    made = builder(capture_sizes=(2,))
    made.build_for_cudagraph_capture(common_of([1, 1], [5, 96]))
    step = made.build(0, common_of(query_lens, seq_lens)).step
    assert (step.max_query_len, step.max_key_len) == bounds


def test_the_repositorys_flash_attention_2_gets_prefix_sums() -> None:
    with stubbed("flash_attn"):
        layer = layer_spec(block_size=256)
        common = common_of([1, 2, 1], [20, 0, 300], block_size=256)
        made = builder(layer, capture_sizes=(3,))
        starts = made.build(0, common).step.key_start_loc
        assert starts is not None
        # The two rows of the request without keys get one each.
        assert (starts.tolist(), starts.dtype) == ([0, 20, 22, 322], torch.int32)
        again = made.build(0, common).step.key_start_loc
        assert again is not None
        assert again.data_ptr() == starts.data_ptr()


@pytest.mark.parametrize(
    ("query_lens", "config", "bound"),
    [
        ([1, 1], {}, 1),
        ([1, 0], {}, 2),
        ([1, 1], {"batch_invariant": True}, 2),
        ([3, 1], {}, 3),
    ],
    ids=["decode", "queryless", "invariant", "mixed"],
)
def test_flash_attention_2_is_told_of_single_queries_only_where_rows_are_requests(
    second: Recorder, query_lens: list[int], config: dict[str, Any], bound: int
) -> None:
    metadata = builder(**config).build(0, common_of(query_lens, [20, 20]))
    assert metadata.step.max_query_len == bound
    assert metadata.step.num_splits == int(bool(config))


def test_lengths_of_keys_of_an_encoder(third: Recorder) -> None:
    cross = layer_spec(attn_type=AttentionType.ENCODER_DECODER)
    lens = torch.tensor([7, 20], dtype=torch.int32)
    common = common_of([1, 2], [30, 30], encoder_seq_lens=lens, encoder_seq_lens_cpu=lens)
    step = builder(cross).build(0, common).step
    assert step.key_lens is lens
    assert (step.max_key_len, step.causal) == (20, False)
    unknown = common.with_fields(encoder_seq_lens_cpu=None)
    assert builder(cross).build(0, unknown).step.max_key_len == 32  # two blocks
    with pytest.raises(MetadataError, match="encoder_seq_lens"):
        builder(cross).build(0, common_of([1], [5]))


def test_keys_that_come_with_the_call(third: Recorder) -> None:
    encoder = layer_spec(attn_type=AttentionType.ENCODER, kv_cache_spec=None)
    starts = torch.tensor([0, 2, 9], dtype=torch.int32)
    common = common_of([3, 4], [3, 4], causal=False).with_fields(block_table=None)
    metadata = builder(encoder).build(0, common)
    assert metadata.step.key_start_loc is common.query_start_loc
    assert (metadata.num_keys, metadata.step.max_key_len) == (7, 4)
    other = common.with_fields(key_start_loc=starts, key_start_loc_cpu=starts)
    metadata = builder(encoder).build(0, other)
    assert metadata.step.key_start_loc is starts
    assert (metadata.num_keys, metadata.step.max_key_len) == (9, 7)
    assert metadata.step.schedule is None


def shared_prefix(count: int = 2) -> Any:
    common = common_of([1] * count, [40] * count)
    assert common.block_table is not None
    table = common.block_table.clone()
    table[:, :2] = table[:1, :2]
    return common.with_fields(block_table=table)


def test_a_shared_prefix_is_one_request_of_all_rows(third: Recorder) -> None:
    metadata = builder().build(32, shared_prefix())
    prefix, suffix = metadata.prefix, metadata.step
    assert prefix is not None
    assert prefix.key_lens is not None
    assert suffix.key_lens is not None
    assert prefix.block_table is not None
    assert suffix.block_table is not None
    assert (prefix.query_start_loc.tolist(), prefix.key_lens.tolist()) == ([0, 2], [32])
    assert (prefix.max_query_len, prefix.max_key_len, prefix.causal) == (2, 32, False)
    assert suffix.key_lens.tolist() == [8, 8]
    assert (prefix.block_table.shape, suffix.block_table.shape) == ((1, 2), (2, 1))
    assert suffix.max_key_len == 8
    assert suffix.causal


def test_a_prefix_moves_with_its_table(third: Recorder) -> None:
    made, common = builder(), shared_prefix()
    table = common.block_table + 100
    moved = made.update_block_table(made.build(32, common), table, torch.zeros(2).long())
    assert moved.prefix is not None
    assert moved.prefix.block_table is not None
    assert moved.step.block_table is not None
    assert moved.prefix.block_table.tolist() == table[:1, :2].tolist()
    assert moved.step.block_table.tolist() == table[:, 2:].tolist()


@pytest.mark.parametrize("fields", [{"window": (4, 0)}, {"has_alibi": True}])
def test_a_prefix_beside_a_window_or_slopes_is_refused(
    second: Recorder, fields: dict[str, Any]
) -> None:
    with pytest.raises(UnsupportedOptionError, match="common_prefix_len=32"):
        builder(layer_spec(**fields)).build(32, shared_prefix())


def test_cascade_pays_as_the_shared_policy_says(third: Recorder) -> None:
    made = builder()
    assert made.use_cascade_attention(512, [2] * 8, 132)
    assert not made.use_cascade_attention(128, [2] * 8, 132)
    assert not made.use_cascade_attention(512, [2] * 7, 132)
    windowed = builder(layer_spec(), layer_spec(window=(8, 0)))
    assert not windowed.use_cascade_attention(512, [2] * 8, 132)


def test_layers_without_a_cache_have_no_table_to_move(third: Recorder) -> None:
    encoder = layer_spec(attn_type=AttentionType.ENCODER, kv_cache_spec=None)
    made = builder(encoder)
    common = common_of([3], [3], causal=False).with_fields(block_table=None)
    with pytest.raises(UnsupportedOptionError, match="no block table"):
        made.update_block_table(made.build(0, common), torch.zeros(1, 1).int(), torch.zeros(1))
    assert not made.use_cascade_attention(512, [2] * 8, 132)


def test_layers_that_need_different_builds_do_not_share_a_plan() -> None:
    _fa_loaded.forget()
    both = inventory(vllm_flash_attn_2=build_of(), vllm_flash_attn_3=build_of())
    _fa_loaded.remember(H200, both)
    with pytest.raises(UnsupportedOptionError, match="layer 0 runs on FlashAttention 3"):
        builder(layer_spec(), layer_spec(has_alibi=True))
    _fa_loaded.forget()


def test_layers_of_one_group_have_blocks_of_one_size(third: Recorder) -> None:
    with pytest.raises(UnsupportedOptionError, match="block size of layer layer 1"):
        builder(layer_spec(), layer_spec(block_size=32))


@pytest.mark.parametrize(
    ("names", "level"),
    [
        (("vllm_flash_attn_3",), AttentionCGSupport.ALWAYS),
        (("flash_attn_3", "fa3_fwd"), AttentionCGSupport.ALWAYS),
        (("flash_attn_3", "flash_attn"), AttentionCGSupport.UNIFORM_BATCH),
        (("flash_attn_4",), AttentionCGSupport.UNIFORM_BATCH),
        (("vllm_flash_attn_2",), AttentionCGSupport.UNIFORM_BATCH),
    ],
)
def test_the_graph_level_is_that_of_all_builds_that_may_run(
    names: tuple[str, ...], level: AttentionCGSupport
) -> None:
    _fa_loaded.forget()
    _fa_loaded.remember(H200, inventory(**dict.fromkeys(names)))
    assert FlashAttnMetadataBuilder.get_cudagraph_support(BuildConfig(), None) is level
    _fa_loaded.forget()


def test_the_request_of_a_layer_is_the_one_that_selection_saw() -> None:
    assert request(flash_attn_version=3).flash_attn_version == 3
    assert LayerSpec.from_request(request(flash_attn_version=3), scale=1.0).flash_attn_version == 3


def test_no_more_than_uniform_batches_are_promised_before_anything_is_loaded() -> None:
    _fa_loaded.forget()
    level = FlashAttnMetadataBuilder.get_cudagraph_support(BuildConfig(), None)
    assert level is AttentionCGSupport.UNIFORM_BATCH
