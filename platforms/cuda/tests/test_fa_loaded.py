"""What the process has loaded, and which build a layer's constructor gets from it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fa_testing import H200, build_of, inventory, layer_spec

from attn_cuda import _fa_loaded
from attn_shared.device import preset
from attn_shared.errors import UnsupportedOptionError, VendorMissingError

A100 = preset("a100")
BOTH = inventory(vllm_flash_attn_2=build_of(), vllm_flash_attn_3=build_of())


@pytest.fixture(autouse=True)
def nothing_loaded() -> Iterator[None]:
    _fa_loaded.forget()
    yield
    _fa_loaded.forget()


def test_nothing_loaded_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(VendorMissingError, match="load_vendor"):
        _fa_loaded.provider_of(layer_spec())


def test_a_layer_gets_what_selection_resolved() -> None:
    _fa_loaded.remember(H200, BOTH)
    provider, entry = _fa_loaded.provider_of(layer_spec())
    assert provider.library == "vllm_flash_attn_3"
    assert entry.device == H200
    assert entry.usable == ("vllm_flash_attn_3", "vllm_flash_attn_2")


def test_the_latest_word_on_an_architecture_counts() -> None:
    _fa_loaded.remember(H200, BOTH)
    _fa_loaded.remember(H200, inventory(vllm_flash_attn_2=build_of()))
    assert _fa_loaded.provider_of(layer_spec())[0].version == 2


def test_a_layer_that_no_build_serves_is_refused_with_the_reason() -> None:
    _fa_loaded.remember(A100, BOTH)
    with pytest.raises(UnsupportedOptionError, match=r"on sm_80: sink=True .*FlashAttention 3"):
        _fa_loaded.provider_of(layer_spec(has_sinks=True))


def test_a_named_generation_reaches_the_constructor() -> None:
    _fa_loaded.remember(H200, BOTH)
    assert _fa_loaded.provider_of(layer_spec(flash_attn_version=2))[0].version == 2
    with pytest.raises(UnsupportedOptionError, match="flash_attn_version=4"):
        _fa_loaded.provider_of(layer_spec(flash_attn_version=4))


def test_unequal_gpus_that_need_different_builds_are_refused() -> None:
    _fa_loaded.remember(H200, BOTH)
    _fa_loaded.remember(A100, BOTH)
    assert _fa_loaded.provider_of(layer_spec(flash_attn_version=2))[0].version == 2
    with pytest.raises(UnsupportedOptionError, match=r"sm_90: FlashAttention 3.*sm_80: FlashA"):
        _fa_loaded.provider_of(layer_spec())
