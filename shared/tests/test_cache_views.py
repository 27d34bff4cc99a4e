"""Views of a cache, kept as long as the cache."""

from __future__ import annotations

import weakref

import pytest
import torch

from attn_shared.cache_views import Views


def test_views_of_the_last_cache_are_kept() -> None:
    views, cache = Views(), torch.zeros(2, 2, 4)
    assert views.cache() is None
    views.keep(cache, (cache[:, 0], cache[:, 1]))
    assert views.cache() is cache
    assert views.parts[1].data_ptr() == cache[:, 1].data_ptr()


def test_views_go_with_their_cache() -> None:
    views, cache = Views(), torch.zeros(2, 2, 4)
    views.keep(cache, (cache[:, 0], cache[:, 1]))
    seen = weakref.ref(views.parts[0])
    del cache
    assert views.cache() is None
    assert seen() is None
    with pytest.raises(LookupError):
        _ = views.parts


def test_a_former_cache_that_goes_takes_nothing_with_it() -> None:
    views, former, cache = Views(), torch.zeros(2, 2, 4), torch.ones(2, 2, 4)
    views.keep(former, (former[:, 0], former[:, 1]))
    views.keep(cache, (cache[:, 0], cache[:, 1]))
    del former
    assert views.cache() is cache
    assert views.parts[0].sum() == 8
