from __future__ import annotations

from typing import Any

import pytest
import torch
from attn_cpu_testing import needs_kernels

from attn_cpu._attn_metadata import CpuAttnMetadata, CpuAttnMetadataBuilder
from attn_cpu._plans import sight_of
from attn_cpu._vendor.attn_cpu_kernels import load
from attn_shared.backend import AttentionCGSupport
from attn_shared.errors import MetadataError, UnsupportedOptionError
from attn_shared.kv_cache import FullAttentionSpec
from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.request import AttentionType
from attn_shared.spec import BuildConfig, LayerSpec
from attn_shared.workspace import Workspace

pytestmark = needs_kernels

CPU = torch.device("cpu")
TABLE = torch.arange(64, dtype=torch.int32).reshape(2, 32)


@pytest.fixture(autouse=True)
def library() -> None:
    load()


def cache(block_size: int = 16) -> FullAttentionSpec:
    return FullAttentionSpec(
        block_size=block_size,
        dtype=torch.bfloat16,
        num_kv_heads=2,
        head_size=64,
        head_size_v=64,
    )


def spec(**fields: Any) -> LayerSpec:
    plain = {"num_heads": 8, "num_kv_heads": 2, "head_size": 64, "head_size_v": 64}
    plain |= {"scale": 0.125, "dtype": torch.bfloat16, "kv_cache_spec": cache()}
    return LayerSpec(**(plain | fields))


def builder(*layers: LayerSpec, **config: Any) -> CpuAttnMetadataBuilder:
    given = layers or (spec(),)
    named = {f"layer{index}": layer for index, layer in enumerate(given)}
    return CpuAttnMetadataBuilder(given[0].kv_cache_spec, named, BuildConfig(**config), CPU)


def common(seq_lens: tuple[int, int] = (100, 200), **options: Any) -> CommonAttentionMetadata:
    return CommonAttentionMetadata.from_lengths(
        query_lens=[1, 1], seq_lens=seq_lens, block_table=TABLE, **options
    )


def test_one_plan_per_sight() -> None:
    wide, narrow = spec(), spec(window=(63, 0))
    metadata = builder(wide, narrow, spec(softcap=30.0)).build(0, common())
    assert set(metadata.plans) == {sight_of(wide), sight_of(narrow)}
    assert metadata.num_actual_tokens == 2


def test_the_workspace_does_not_grow_with_the_context() -> None:
    table = torch.zeros(2, 8192, dtype=torch.int32)

    def size(length: int) -> int:
        batch = CommonAttentionMetadata.from_lengths(
            query_lens=[1, 1], seq_lens=[length, length], block_table=table
        )
        (plan,) = builder().build(0, batch).plans.values()
        return len(plan.workspace)

    assert size(128 * 1024) == size(32 * 1024) == size(8 * 1024)
    assert size(40) <= size(8 * 1024)


def test_the_workspace_given_is_used_and_grown_at_once() -> None:
    own = Workspace(CPU)
    metadata = builder(workspace=own).build(0, common())
    buffer = own.get(own.num_bytes)
    for plan in metadata.plans.values():
        assert plan.workspace.data_ptr() == buffer.data_ptr()
        assert 0 < len(plan.workspace) <= own.num_bytes


def test_threads_are_torchs() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = next(iter(builder().build(0, common((512, 512))).plans.values()))
        torch.set_num_threads(8)
        eight = next(iter(builder().build(0, common((512, 512))).plans.values()))
    finally:
        torch.set_num_threads(before)
    assert not torch.equal(one.pieces, eight.pieces)


def test_another_table_of_the_same_batch() -> None:
    own = builder()
    metadata = own.build(0, common())
    table = TABLE.flip(0)
    changed = own.update_block_table(metadata, table, torch.zeros(2, dtype=torch.int64))
    assert changed.batch.block_table is not None
    assert torch.equal(changed.batch.block_table, table)
    assert changed.plans is metadata.plans
    assert isinstance(changed, CpuAttnMetadata)
    with pytest.raises(MetadataError, match="key length of request 1 is 200; allowed: at most 64"):
        own.update_block_table(metadata, TABLE[:, :4], torch.zeros(2, dtype=torch.int64))


def test_cache_free_layers_have_no_table() -> None:
    encoder = spec(attn_type=AttentionType.ENCODER_ONLY, kv_cache_spec=None)
    own = builder(encoder)
    batch = CommonAttentionMetadata.from_lengths(query_lens=[5, 3], seq_lens=[5, 3], causal=False)
    metadata = own.build(0, batch)
    assert metadata.batch.num_keys == 8
    with pytest.raises(UnsupportedOptionError, match="have no block table"):
        own.update_block_table(metadata, TABLE, torch.zeros(2, dtype=torch.int64))


def test_layers_that_cannot_share() -> None:
    with pytest.raises(UnsupportedOptionError, match="agree on num_heads"):
        builder(spec(), spec(num_heads=16))
    with pytest.raises(
        UnsupportedOptionError, match="does not have the block size of layer layer1"
    ):
        builder(spec(), spec(kv_cache_spec=cache(32)))


def test_no_graphs_on_a_cpu() -> None:
    level = CpuAttnMetadataBuilder.get_cudagraph_support(BuildConfig(), cache())
    assert level is AttentionCGSupport.NEVER


def test_checked_mode_looks_at_contents() -> None:
    batch = common().with_fields(block_table=torch.full_like(TABLE, -5))
    assert not builder().build(0, batch).is_checked
    with pytest.raises(MetadataError, match="block_table"):
        builder(checked=True).build(0, batch)
