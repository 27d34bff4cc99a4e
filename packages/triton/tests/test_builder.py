"""The builder: what it refuses, what it keeps for a captured graph, what it asks of the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attn_shared.backend import AttentionCGSupport
from attn_shared.errors import MetadataError, UnsupportedOptionError
from attn_shared.kv_cache import FullAttentionSpec
from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.spec import BuildConfig, LayerSpec
from attn_triton._builder import TritonAttentionMetadataBuilder
from attn_triton._metadata import TritonAttentionMetadata
from attn_triton._visibility import visibility_of

pytestmark = pytest.mark.interpreter

CACHE = FullAttentionSpec(
    block_size=4, dtype=torch.float32, num_kv_heads=2, head_size=16, head_size_v=16
)


def layer(**options: Any) -> LayerSpec:
    plain: dict[str, Any] = {
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_size": 16,
        "head_size_v": 16,
        "scale": 1.0,
        "dtype": torch.float32,
        "kv_cache_spec": CACHE,
    }
    return LayerSpec(**{**plain, **options})


def builder(*layers: LayerSpec, **config: Any) -> TritonAttentionMetadataBuilder:
    named = {f"layer {index}": each for index, each in enumerate(layers or (layer(),))}
    return TritonAttentionMetadataBuilder(CACHE, named, BuildConfig(**config), torch.device("cpu"))


def batch(query_lens: list[int], seq_lens: list[int], **options: Any) -> CommonAttentionMetadata:
    columns = max(1, -(-max(seq_lens) // 4))
    table = torch.arange(len(seq_lens) * columns, dtype=torch.int32).view(-1, columns)
    return CommonAttentionMetadata.from_lengths(
        query_lens=query_lens, seq_lens=seq_lens, block_table=table, **options
    )


def addresses(metadata: TritonAttentionMetadata) -> list[int]:
    tensors = [*metadata.plans.values(), metadata.parts, metadata.stats]
    return [tensor.data_ptr() for tensor in tensors]


def test_the_graph_level_is_always() -> None:
    level = TritonAttentionMetadataBuilder.get_cudagraph_support(BuildConfig(), CACHE)
    assert level is AttentionCGSupport.ALWAYS


def test_host_lengths_are_not_needed() -> None:
    common = batch([1, 1], [9, 300]).with_fields(seq_lens_cpu=None)
    metadata = builder().build(0, common)
    assert metadata.decode is not None
    assert metadata.decode.may_split


def test_a_captured_step_keeps_its_buffers_and_gets_new_items() -> None:
    build = builder()
    captured = build.build_for_cudagraph_capture(batch([1, 1], [300, 9]))
    (plan,) = captured.plans.values()
    before = plan.clone()
    later = build.build(0, batch([1, 1], [9, 300]))
    assert addresses(later) == addresses(captured)
    assert later.decode == captured.decode
    assert not torch.equal(plan, before)


def test_a_batch_of_another_size_or_of_longer_queries_is_not_the_captured_one() -> None:
    build = builder()
    captured = build.build_for_cudagraph_capture(batch([2, 2], [300, 9]))
    for other in (batch([1, 1], [300, 9]), batch([1, 3], [300, 9]), batch([4], [300])):
        assert addresses(build.build(0, other)) != addresses(captured)


def test_a_captured_batch_has_no_ranges() -> None:
    with pytest.raises(UnsupportedOptionError, match="mm_prefix_ranges"):
        builder().build_for_cudagraph_capture(batch([5], [9], mm_prefix_ranges={0: ((1, 3),)}))


def test_ranges_become_a_table_with_empty_ones() -> None:
    metadata = builder().build(0, batch([5, 5], [9, 9], mm_prefix_ranges={1: ((1, 3), (5, 5))}))
    assert metadata.ranges is not None
    assert metadata.ranges.tolist() == [[[0, -1], [0, -1]], [[1, 3], [5, 5]]]
    assert metadata.decode is None  # the kernel of few tokens knows no ranges


@pytest.mark.parametrize("ranges", [{7: ((1, 2),)}, {0: ((3, 1),)}, {0: ((-1, 1),)}])
def test_ranges_that_are_none(ranges: Any) -> None:
    with pytest.raises(MetadataError, match="mm_prefix_ranges"):
        builder().build(0, batch([5, 5], [9, 9], mm_prefix_ranges=ranges))


def test_layers_that_differ_in_what_they_see_get_plans_of_their_own() -> None:
    layers = (layer(), layer(window=(3, 0)), layer(window=(3, 0), softcap=2.0))
    metadata = builder(*layers).build(0, batch([1], [40]))
    assert list(metadata.plans) == [visibility_of(layers[0]), visibility_of(layers[1])]
    assert visibility_of(layers[1]) is visibility_of(layers[2])


def test_layers_of_other_heads_or_blocks_are_refused() -> None:
    with pytest.raises(UnsupportedOptionError, match="num_heads"):
        builder(layer(), layer(num_heads=8))
    other = FullAttentionSpec(
        block_size=8, dtype=torch.float32, num_kv_heads=2, head_size=16, head_size_v=16
    )
    with pytest.raises(UnsupportedOptionError, match="block size"):
        builder(layer(kv_cache_spec=other))


def test_a_table_moves_and_the_plan_stays() -> None:
    build = builder()
    metadata = build.build(0, batch([1], [9]))
    table = torch.zeros(1, 3, dtype=torch.int32)
    moved = build.update_block_table(metadata, table, torch.zeros(1, dtype=torch.int64))
    assert moved.block_table is table
    assert addresses(moved) == addresses(metadata)
    (visibility,) = moved.plans
    step, before = moved.step(visibility), metadata.step(visibility)
    assert step is not None
    assert before is not None
    assert step.decode is not None
    assert table.data_ptr() in step.decode.addresses
    assert before.decode is not None
    assert table.data_ptr() not in before.decode.addresses


def test_uniform_batches_that_fill_the_wave_are_not_merged() -> None:
    """The interpreter stands for 4 units: 4 slots for 2 kv heads."""
    decode = builder().build(0, batch([1] * 3, [64] * 3)).decode
    assert decode is not None
    assert not decode.may_split
    decode = builder().build(0, batch([1] * 3, [300, 3, 3])).decode
    assert decode is not None
    assert decode.may_split
