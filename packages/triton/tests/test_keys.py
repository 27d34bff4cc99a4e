"""Where keys and values are: addresses and strides that follow the cache that is handed over."""

from __future__ import annotations

import gc
import weakref

import torch

from attn_shared.dtypes import KVCacheLayout
from attn_shared.kv_cache import FullAttentionSpec
from attn_triton._keys import CacheReader, keys_of_call


def spec(layout: KVCacheLayout = KVCacheLayout.NHD, **options: object) -> FullAttentionSpec:
    plain = {"dtype": torch.float16, "head_size": 8, "head_size_v": 8, "layout": layout}
    return FullAttentionSpec(block_size=4, num_kv_heads=3, **{**plain, **options})  # type: ignore[arg-type]


def test_strides_of_both_layouts_and_of_padded_blocks() -> None:
    """A block holds keys and values of 4 tokens, 3 heads, 8 elements: 192 in all."""
    cache = spec().allocate(2, "cpu")
    keys = CacheReader(spec()).read(cache)
    assert keys.strides == ((192, 24, 8), (192, 24, 8))
    assert (keys.key, keys.value) == (cache.data_ptr(), cache.data_ptr() + 96 * 2)
    heads_first = spec(KVCacheLayout.HND)
    assert CacheReader(heads_first).read(heads_first.allocate(2, "cpu")).strides[0] == (192, 8, 32)
    padded = spec(page_size_padded=400)
    assert CacheReader(padded).read(padded.allocate(2, "cpu")).strides[0] == (200, 24, 8)


def test_scales_beside_entries() -> None:
    own = spec(kv_cache_dtype="int8_per_token_head", dtype=torch.int8)
    cache = own.allocate(2, "cpu")
    keys = CacheReader(own).read(cache)
    assert keys.has_inline_scales
    assert keys.key_scales == cache.data_ptr() + 8  # after the 8 bytes of the first entry


def test_another_cache_is_looked_at_anew() -> None:
    reader = CacheReader(spec())
    first, second = spec().allocate(2, "cpu"), spec().allocate(3, "cpu")
    assert reader.read(first) is reader.read(first)
    assert reader.read(second).key == second.data_ptr()
    assert reader.read(first).key == first.data_ptr()
    assert reader.known(second) is reader.read(second)
    assert reader.known(spec().allocate(2, "cpu")) is None


def test_a_reader_keeps_no_cache_alive() -> None:
    reader = CacheReader(spec())
    cache = spec().allocate(2, "cpu")
    reader.read(cache)
    gone = weakref.ref(cache)
    del cache
    gc.collect()
    assert gone() is None


def test_keys_of_a_call() -> None:
    key, value = torch.zeros(5, 3, 8), torch.zeros(5, 3, 16)
    keys = keys_of_call(key, value)
    assert keys.strides == ((0, 24, 8), (0, 48, 16))
    assert (keys.page, keys.key, keys.has_inline_scales) == (0, key.data_ptr(), False)
