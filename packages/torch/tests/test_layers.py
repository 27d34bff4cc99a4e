"""A layer's description is refused with the reasons of its request."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attn_shared.capability import Capability, DeviceLimit, SizeSet, Support
from attn_shared.dtypes import KVCacheLayout
from attn_shared.errors import InvalidRequestError, UnsupportedOptionError
from attn_shared.kv_cache import spec_for
from attn_shared.request import AttentionRequest, AttentionType
from attn_shared.spec import LayerSpec
from attn_shared.vendor import Vendor
from attn_torch._layers import request_of, require_served

NARROW = Capability(
    devices=(DeviceLimit(vendor=Vendor.NVIDIA),),
    dtypes=frozenset({torch.bfloat16}),
    head_sizes=SizeSet.of(64),
    block_sizes=(16,),
    window=Support.YES,
)

REQUEST = AttentionRequest(num_heads=4, num_kv_heads=2, head_size=64, window=(7, 0), block_size=16)


def _layer(request: AttentionRequest) -> LayerSpec:
    cache = (
        None if request.is_cache_free else spec_for(request, block_size=request.block_size or 16)
    )
    return LayerSpec.from_request(request, scale=0.1, kv_cache_spec=cache)


def test_a_layers_request_is_the_one_it_was_made_from():
    request = REQUEST.with_options(
        head_size_v=64,
        has_sinks=True,
        has_alibi=True,
        softcap=3.0,
        chunk_size=5,
        batch_invariant=True,
        dcp_size=2,
        kv_cache_dtype="fp8",
        kv_layout=KVCacheLayout.NHD,
    )
    assert request_of(_layer(request)) == request


def test_an_encoders_request_has_no_cache():
    request = AttentionRequest(
        num_heads=4, num_kv_heads=4, head_size=64, attn_type=AttentionType.ENCODER
    )
    assert request_of(_layer(request)).block_size is None


def test_the_device_is_not_the_layers_affair():
    require_served("NARROW", NARROW, _layer(REQUEST))


def test_every_reason_is_named():
    layer = _layer(REQUEST.with_options(head_size=80, has_sinks=True, block_size=8))
    with pytest.raises(UnsupportedOptionError, match=r"NARROW.*head_size=80.*block_size=8.*sink"):
        require_served("NARROW", NARROW, layer)


def test_a_layer_that_no_backend_may_accept():
    with pytest.raises(InvalidRequestError, match="num_kv_heads=3"):
        require_served("NARROW", NARROW, replace(_layer(REQUEST), num_kv_heads=3))


def test_a_cache_of_another_layer_is_refused():
    layer = _layer(REQUEST)
    with pytest.raises(InvalidRequestError, match="kv_cache_spec=None"):
        require_served("NARROW", NARROW, replace(layer, kv_cache_spec=None))
    other = spec_for(REQUEST.with_options(num_kv_heads=4), block_size=16)
    with pytest.raises(InvalidRequestError, match=r"kv_cache_spec.num_kv_heads=4.*2, the layer's"):
        require_served("NARROW", NARROW, replace(layer, kv_cache_spec=other))
