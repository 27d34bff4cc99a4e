"""Gathering blocks and slots equals indexing, in every layout, format and path."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attn_torch_testing import Case
from torch import Tensor

from attn_shared.dtypes import KVCacheLayout, KVQuantMode
from attn_shared.errors import MetadataError
from attn_shared.kv_cache import AttentionSpec, FullAttentionSpec, KVViews
from attn_shared.workspace import Workspace
from attn_torch import _cache_reader
from attn_torch._batch import HostBatch
from attn_torch._cache_reader import CacheReader, CallReader, gather_blocks, gather_tokens
from attn_torch._plan import GroupLimits, RequestTile, Tiler
from attn_torch._visibility import Visibility

BLOCKS = torch.tensor([4, 0, 3], dtype=torch.int32)
NHD, HND = KVCacheLayout

LAYOUTS = pytest.mark.parametrize("layout", [NHD, HND])


def _spec(layout: KVCacheLayout, **options) -> AttentionSpec:
    fields = {
        "block_size": 4,
        "num_kv_heads": 3,
        "head_size": 8,
        "head_size_v": 8,
        "dtype": torch.float32,
    }
    return FullAttentionSpec(**(fields | options), layout=layout)


def _views(spec: AttentionSpec, num_blocks: int = 5) -> KVViews:
    cache = spec.allocate(num_blocks, "cpu")
    storage = torch.empty(0, dtype=spec.dtype).set_(cache.untyped_storage())
    counted = torch.arange(storage.numel()) % 120
    storage.copy_(counted.to(storage.dtype))
    return spec.split(cache)


def _same(got: Tensor, expected: Tensor) -> bool:
    return got.shape == expected.shape and bool((got.float() == expected.float()).all())


FORMATS = pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_kv_heads": 1},
        {"block_size": 1},
        {"head_size_v": 5},
        {"page_size_padded": 4 * 2 * 4 * 3 * 8 + 4},
        {"page_size_padded": 4 * 2 * 4 * 3 * 8 * 2},
        {"dtype": torch.float8_e4m3fn, "kv_cache_dtype": "fp8"},
        {"dtype": torch.float8_e4m3fnuz, "kv_cache_dtype": "fp8_e4m3"},
        {"dtype": torch.int8, "kv_cache_dtype": "int8_per_token_head"},
        {"dtype": torch.bfloat16, "head_size": 1, "head_size_v": 1},
    ],
    ids=str,
)


@LAYOUTS
@FORMATS
def test_blocks_follow_one_another(layout, options):
    for view in _views(_spec(layout, **options)):
        if view is not None:
            expected = view[BLOCKS.long()].flatten(0, 1)
            assert _same(gather_blocks(view, BLOCKS), expected)
            count = expected.numel() * expected.dtype.itemsize
            place = torch.zeros(count, dtype=torch.uint8)
            assert _same(gather_blocks(view, BLOCKS, out=place), expected)
            assert place.any()


@LAYOUTS
@FORMATS
def test_slots_are_those_of_block_and_offset(layout, options):
    spec = _spec(layout, **options)
    blocks = torch.tensor([[4, 0], [2, 2]])
    offsets = torch.tensor([[0, 3], [2, 1]]) % spec.block_size
    for view in _views(spec):
        if view is not None:
            assert _same(gather_tokens(view, blocks, offsets), view[blocks, offsets])


def test_a_view_of_any_strides_is_gathered():
    views = _views(_spec(NHD))
    odd = views.key.transpose(0, 1)[:, :, ::2]
    expected = odd[torch.tensor([2, 1])].flatten(0, 1)
    assert _same(gather_blocks(odd, torch.tensor([2, 1])), expected)
    pair = torch.tensor([[2]]), torch.tensor([[4]])
    assert _same(gather_tokens(odd, *pair), odd[pair])


def test_head_major_blocks_stay_head_major():
    gathered = gather_blocks(_views(_spec(HND)).key, BLOCKS)
    assert gathered.transpose(0, 1).is_contiguous()


def _reader(case: Case, **scales) -> tuple[CacheReader, RequestTile, KVViews]:
    batch = case.build()
    spec = batch.spec.kv_cache_spec
    assert isinstance(spec, AttentionSpec)
    assert batch.kv_cache is not None
    views = spec.split(batch.kv_cache)
    tiler = Tiler(
        visibility=Visibility(window=case.window),
        limits=GroupLimits(max_keys=0, max_logits=1),
        device=torch.device("cpu"),
        block_size=case.block_size,
    )
    lengths = HostBatch.of(batch.common, case.attn_type, case.block_size)
    (tile,) = tiler.plan(lengths, batch.common.block_table).tiles
    assert isinstance(tile, RequestTile)
    reader = CacheReader(
        views=views,
        quant_mode=spec.quant_mode,
        dtype=case.dtype,
        k_scale=scales.get("k_scale", 1.0),
        v_scale=scales.get("v_scale", 1.0),
        scratch=Workspace(torch.device("cpu")),
    )
    return reader, tile, views


def _slots(tile: RequestTile, view: Tensor, size: int) -> Tensor:
    """Index the keys of a tile one by one."""
    assert tile.blocks is not None
    first = tile.first_key // size
    positions = range(tile.first_key, tile.stop_key)
    rows = [view[int(tile.blocks[p // size - first]), p % size] for p in positions]
    return torch.stack(rows)


@LAYOUTS
def test_a_request_is_read_from_its_windows_first_key(layout):
    case = Case(query_lens=(1,), seq_lens=(11,), window=(4, 0), layout=layout, head_size_v=7)
    reader, tile, views = _reader(case)
    key, value = reader.read(tile)
    assert key.shape == (1, 5, 2, 16)
    assert _same(key[0], _slots(tile, views.key, 4))
    assert _same(value[0], _slots(tile, views.value, 4))


@LAYOUTS
@pytest.mark.parametrize("head_size_v", [3, 16, 40])
def test_large_gathers_share_scratch_without_touching_each_other(layout, head_size_v, monkeypatch):
    monkeypatch.setattr(_cache_reader, "SCRATCH_BYTES", 0)
    case = Case(query_lens=(1,), seq_lens=(11,), layout=layout, head_size_v=head_size_v)
    reader, tile, views = _reader(case)
    for _ in range(2):
        key, value = reader.read(tile)
        assert _same(key[0], _slots(tile, views.key, 4))
        assert _same(value[0], _slots(tile, views.value, 4))
    assert key.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()


def test_fp8_is_multiplied_by_its_scales():
    scale = torch.tensor([0.5, 2.0])
    case = Case(query_lens=(1,), seq_lens=(5,), kv_cache_dtype="fp8", k_scale=scale, v_scale=0.25)
    reader, tile, views = _reader(case, k_scale=scale, v_scale=0.25)
    key, value = reader.read(tile)
    stored = _slots(tile, views.key, 4).float()
    assert torch.equal(key[0], stored * scale.unsqueeze(1))
    assert torch.equal(value[0], _slots(tile, views.value, 4).float() * 0.25)


def test_int8_is_multiplied_by_the_scale_beside_it():
    case = Case(query_lens=(1,), seq_lens=(5,), kv_cache_dtype="int8_per_token_head")
    reader, tile, views = _reader(case)
    assert reader.quant_mode is KVQuantMode.INT8_PER_TOKEN_HEAD
    key, _ = reader.read(tile)
    assert views.key_scale is not None
    scales = _slots(tile, views.key_scale, 4)
    assert torch.equal(key[0], _slots(tile, views.key, 4).float() * scales.unsqueeze(-1))


def test_readers_refuse_tiles_of_the_other_kind():
    reader, tile, _ = _reader(Case(query_lens=(1,), seq_lens=(5,)))
    with pytest.raises(MetadataError, match="planned without a block table"):
        reader.read(replace(tile, blocks=None))
    rows = torch.zeros(5, 2, 16)
    with pytest.raises(MetadataError, match="planned over a cache"):
        CallReader(key=rows, value=rows).read(tile)
