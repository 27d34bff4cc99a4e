"""TORCH_SDPA's builder: groups of layers, cascade, other tables, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attn_torch_testing import Batch, Case

from attn_shared.backend import AttentionCGSupport
from attn_shared.errors import MetadataError, UnsupportedOptionError
from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.request import AttentionType
from attn_shared.spec import BuildConfig, LayerSpec
from attn_shared.workspace import Workspace
from attn_torch.backends.torch_sdpa import (
    TorchSDPAImpl,
    TorchSDPAMetadata,
    TorchSDPAMetadataBuilder,
)

CPU = torch.device("cpu")
BATCH = Case(query_lens=(1, 4, 1), seq_lens=(13, 14, 11)).build()


def _builder(batch: Batch, *others: LayerSpec, **config) -> TorchSDPAMetadataBuilder:
    layers = {f"layer{i}": spec for i, spec in enumerate((batch.spec, *others))}
    return TorchSDPAMetadataBuilder(batch.spec.kv_cache_spec, layers, BuildConfig(**config), CPU)


def _forward(batch: Batch, metadata: TorchSDPAMetadata) -> torch.Tensor:
    return TorchSDPAImpl(batch.spec).forward(
        batch.layer, batch.query, batch.key, batch.value, batch.kv_cache, metadata
    )


def test_layers_of_several_windows_share_one_step():
    windowed = BATCH.case.with_fields(window=(3, 0)).build()
    metadata = _builder(BATCH, windowed.spec).build(0, BATCH.common)
    BATCH.check(_forward(BATCH, metadata))
    windowed.check(_forward(windowed, metadata))


def test_layers_that_cannot_share_one_step_are_refused():
    wider = replace(BATCH.spec, num_heads=8)
    with pytest.raises(UnsupportedOptionError, match="agree on num_heads: layer0 has 4"):
        _builder(BATCH, wider)
    with pytest.raises(UnsupportedOptionError, match="agree on attn_type"):
        _builder(BATCH, replace(BATCH.spec, attn_type=AttentionType.ENCODER))


def test_a_cache_of_another_block_size_is_refused():
    other = BATCH.case.with_fields(block_size=8).build()
    with pytest.raises(UnsupportedOptionError, match="block size of layer layer0"):
        TorchSDPAMetadataBuilder(
            other.spec.kv_cache_spec, {"layer0": BATCH.spec}, BuildConfig(), CPU
        )
    with pytest.raises(UnsupportedOptionError, match="kv_cache_spec=None"):
        TorchSDPAMetadataBuilder(None, {"layer0": BATCH.spec}, BuildConfig(), CPU)


def test_a_layer_that_is_not_served_is_refused():
    with pytest.raises(UnsupportedOptionError, match="dcp_chunked_local=4"):
        _builder(replace(BATCH, spec=replace(BATCH.spec, dcp_size=2, chunk_size=4)))


def test_graphs_are_never_captured():
    level = TorchSDPAMetadataBuilder.get_cudagraph_support(BuildConfig(), None)
    assert level is AttentionCGSupport.NEVER


def test_another_block_table():
    builder = _builder(BATCH)
    metadata = builder.build(0, BATCH.common)
    assert builder.supports_update_block_table
    assert BATCH.kv_cache is not None
    assert BATCH.common.block_table is not None
    order = torch.randperm(len(BATCH.kv_cache), generator=torch.Generator().manual_seed(3))
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order))
    is_named = (BATCH.common.block_table >= 0) & (BATCH.common.block_table < len(order))
    table = BATCH.common.block_table.clone()
    table[is_named] = place[table[is_named].long()].int()
    moved = replace(
        BATCH,
        kv_cache=BATCH.kv_cache[order],
        common=BATCH.common.with_fields(block_table=table),
    )
    updated = builder.update_block_table(metadata, table, torch.empty(0, dtype=torch.int64))
    moved.check(_forward(moved, updated))
    BATCH.check(_forward(BATCH, metadata))


def test_without_a_cache_there_is_no_table_to_update():
    encoder = Case(query_lens=(3,), seq_lens=(3,), attn_type=AttentionType.ENCODER).build()
    builder = _builder(encoder)
    metadata = builder.build(0, encoder.common)
    with pytest.raises(UnsupportedOptionError, match="no block table"):
        builder.update_block_table(metadata, torch.zeros(1, 1), torch.zeros(1))


def _with_prefix(num_blocks: int) -> CommonAttentionMetadata:
    assert BATCH.common.block_table is not None
    table = BATCH.common.block_table.clone()
    table[:, :num_blocks] = table[0, :num_blocks]
    return BATCH.common.with_fields(block_table=table)


def test_a_shared_prefix_changes_nothing():
    common = _with_prefix(2)
    batch = replace(BATCH, common=common)
    batch.check(_forward(batch, _builder(BATCH).build(8, common)))


@pytest.mark.parametrize(
    ("prefix", "message"),
    [
        (6, "multiples of block_size=4"),
        (12, "= 10, in whole blocks"),
        (-4, "multiples of block_size"),
    ],
)
def test_a_prefix_that_cascade_attention_cannot_share_is_refused(prefix, message):
    with pytest.raises(MetadataError, match=message):
        _builder(BATCH).build(prefix, _with_prefix(2))


def test_a_prefix_needs_causal_decoders():
    common = _with_prefix(2).with_fields(causal=False)
    with pytest.raises(MetadataError, match="causal"):
        _builder(BATCH).build(4, common)
    encoder = Case(query_lens=(3,), seq_lens=(3,), attn_type=AttentionType.ENCODER).build()
    with pytest.raises(UnsupportedOptionError, match="common_prefix_len=4 with attn_type=encoder"):
        _builder(encoder).build(4, encoder.common)


def test_chunks_need_causal_rows():
    chunked = BATCH.case.with_fields(chunk_size=4).build()
    flags = torch.tensor([True, False, True])
    common = chunked.common.with_fields(causal=flags, causal_cpu=flags)
    with pytest.raises(UnsupportedOptionError, match="chunked_local_causal=chunk_size=4"):
        _builder(chunked).build(0, common)


def test_each_layer_of_a_group_is_asked():
    plain = BATCH.case.build()
    chunked = BATCH.case.with_fields(chunk_size=4).build()
    layers = {"plain": plain.spec, "chunked": chunked.spec}
    builder = TorchSDPAMetadataBuilder(plain.spec.kv_cache_spec, layers, BuildConfig(), CPU)
    with pytest.raises(UnsupportedOptionError, match="chunked_local_causal=chunk_size=4"):
        builder.build(0, plain.common.with_fields(causal=False))


def test_sharded_sequences_are_refused():
    shares = torch.ones(BATCH.common.num_reqs, dtype=torch.int32)
    with pytest.raises(MetadataError, match="dcp_local_seq_lens is given"):
        _builder(BATCH).build(0, BATCH.common.with_fields(dcp_local_seq_lens=shares))


def test_a_bound_of_lengths_is_not_enough():
    with pytest.raises(MetadataError, match="an upper bound"):
        _builder(BATCH).build(0, BATCH.common.with_fields(seq_lens_cpu_is_exact=False))


def test_checked_mode_looks_at_contents():
    seq_lens = torch.tensor([13, 2, 11], dtype=torch.int32)
    common = BATCH.common.with_fields(seq_lens=seq_lens, seq_lens_cpu=seq_lens)
    _builder(BATCH).build(0, common)
    with pytest.raises(MetadataError, match="seq_lens"):
        _builder(BATCH, checked=True).build(0, common)


def test_a_table_on_another_device_is_refused():
    builder = TorchSDPAMetadataBuilder(
        BATCH.spec.kv_cache_spec, {"layer": BATCH.spec}, BuildConfig(), torch.device("meta")
    )
    with pytest.raises(MetadataError, match="block_table device is cpu; allowed: meta"):
        builder.build(0, BATCH.common)


def test_the_configs_workspace_is_used():
    workspace = Workspace(CPU)
    assert _builder(BATCH, workspace=workspace).build(0, BATCH.common).scratch is workspace
