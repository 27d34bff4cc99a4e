from __future__ import annotations

import gc
import weakref

import pytest
import torch

from attn_cpu._views import CacheViews, splitter
from attn_shared.dtypes import KVCacheLayout
from attn_shared.errors import InvalidInputError
from attn_shared.kv_cache import FullAttentionSpec


def spec(**fields: object) -> FullAttentionSpec:
    plain = {"block_size": 4, "dtype": torch.bfloat16, "num_kv_heads": 2}
    plain |= {"head_size": 32, "head_size_v": 32}
    return FullAttentionSpec(**(plain | fields))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"layout": KVCacheLayout.HND},
        {"page_size_padded": 2048},
        {"head_size_v": 64},
        {"dtype": torch.int8, "kv_cache_dtype": "int8_per_token_head"},
        {"dtype": torch.float8_e5m2, "kv_cache_dtype": "fp8_e5m2"},
    ],
)
def test_the_same_views_as_the_specs_own(fields: dict[str, object]) -> None:
    own = spec(**fields)
    cache = own.allocate(3, "cpu")
    for fast, slow in zip(splitter(own)(cache), own.split(cache), strict=True):
        if slow is None:
            assert fast is None
            continue
        assert fast is not None
        assert (fast.data_ptr(), fast.shape, fast.stride(), fast.dtype) == (
            *(slow.data_ptr(), slow.shape, slow.stride(), slow.dtype),
        )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda cache: cache.float(), "kv_cache dtype is float32"),
        (lambda cache: cache[..., :16], "kv_cache shape"),
        (lambda cache: cache.flatten(-2), "kv_cache shape"),
        (lambda cache: torch.stack([cache, cache], -1)[..., 0], "the last stride of kv_cache is 2"),
    ],
)
def test_what_is_no_such_cache_is_refused_as_by_the_spec(change: object, words: str) -> None:
    own = spec()
    with pytest.raises(InvalidInputError, match=words):
        splitter(own)(change(own.allocate(3, "cpu")))  # type: ignore[operator]


def test_views_are_remembered_while_their_cache_lives() -> None:
    own = spec()
    views = CacheViews(own)
    cache = own.allocate(3, "cpu")
    first = views.of(cache)
    assert views.of(cache) is first
    assert first.key.data_ptr() == cache.data_ptr()
    seen, memory = weakref.ref(cache), weakref.ref(first.key)
    del cache, first
    gc.collect()
    assert seen() is None
    assert memory() is None


def test_another_tensor_at_the_address_is_checked() -> None:
    own = spec()
    views = CacheViews(own)
    cache = own.allocate(3, "cpu")
    views.of(cache)
    with pytest.raises(InvalidInputError, match="kv_cache dtype is float16"):
        views.of(cache.view(torch.float16))
    assert views.of(cache[:2]).key.shape[0] == 2


def test_a_cache_that_moved_is_split_anew() -> None:
    own = spec()
    views = CacheViews(own)
    cache, other = own.allocate(3, "cpu"), own.allocate(5, "cpu")
    views.of(cache)
    cache.set_(other)  # type: ignore[call-overload]
    moved = views.of(cache)
    assert (moved.key.data_ptr(), moved.key.shape[0]) == (other.data_ptr(), 5)
