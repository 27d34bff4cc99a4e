"""Layers and batches are refused with the reasons that selection would have."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attn_shared.capability import Capability, DeviceLimit, Reason, Rule, SizeSet, Support
from attn_shared.device import preset
from attn_shared.dtypes import KVCacheLayout
from attn_shared.errors import InvalidRequestError, MetadataError, UnsupportedOptionError
from attn_shared.kv_cache import spec_for
from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.request import AttentionRequest, AttentionType, MLADims, Phase
from attn_shared.served import (
    request_of,
    require_batch_served,
    require_block_table,
    require_served,
)
from attn_shared.spec import LayerSpec
from attn_shared.vendor import Vendor

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


def test_a_device_that_is_known_is_asked_too():
    require_served("NARROW", NARROW, _layer(REQUEST), preset("h200"))
    with pytest.raises(UnsupportedOptionError, match="device=cpu"):
        require_served("NARROW", NARROW, _layer(REQUEST), preset("genericcpu"))


@pytest.mark.parametrize(
    "fields", [{"is_sparse": True}, {"phases": frozenset({Phase.DECODE})}], ids=str
)
def test_what_a_description_does_not_say_is_no_reason(fields):
    require_served("NARROW", replace(NARROW, **fields), _layer(REQUEST))


def test_a_cache_of_latents_is_held_to_the_layers_widths():
    request = AttentionRequest(
        num_heads=4, num_kv_heads=1, head_size=72, mla=MLADims(kv_lora_rank=64, qk_rope_head_dim=8)
    )
    latents = replace(NARROW, is_mla=True, head_sizes=SizeSet.of(72))
    layer = _layer(request)
    require_served("LATENTS", latents, layer)
    other = replace(layer.kv_cache_spec, kv_lora_rank=32)
    with pytest.raises(InvalidRequestError, match=r"kv_cache_spec.kv_lora_rank=32.*64, the layer"):
        require_served("LATENTS", latents, replace(layer, kv_cache_spec=other))
    plain = _layer(REQUEST).kv_cache_spec
    with pytest.raises(InvalidRequestError, match="an MLAAttentionSpec"):
        require_served("LATENTS", latents, replace(layer, kv_cache_spec=plain))


ENCODER = replace(_layer(REQUEST), kv_cache_spec=None, attn_type=AttentionType.ENCODER)


def _batch(**options) -> CommonAttentionMetadata:
    table = torch.tensor([[7, 1, 2], [7, 3, 4]], dtype=torch.int32)
    lengths = {"query_lens": [1, 2], "seq_lens": [33, 34]}
    return CommonAttentionMetadata.from_lengths(**({"block_table": table} | lengths | options))


def test_a_plain_batch_passes_with_a_prefix_that_is_shared():
    require_batch_served("NARROW", NARROW, _layer(REQUEST), _batch())
    require_batch_served("NARROW", NARROW, _layer(REQUEST), _batch(), 16)
    require_batch_served("NARROW", NARROW, _layer(REQUEST), _batch(mm_prefix_ranges={0: []}))


FLAGS = torch.tensor([True, True])
SHARES = torch.tensor([17, 17], dtype=torch.int32)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"causal": False}, "non_causal=True"),
        ({"causal": FLAGS, "causal_cpu": FLAGS}, "per_request_causal=True"),
        ({"mm_prefix_ranges": {1: [(0, 3)]}}, "mm_prefix=True"),
    ],
    ids=["non_causal", "per_request_causal", "mm_prefix"],
)
def test_what_a_batch_asks_and_the_capability_does_not_name(options, words):
    batch = _batch().with_fields(**options)
    with pytest.raises(
        UnsupportedOptionError, match=f"NARROW does not serve this batch: .*{words}"
    ):
        require_batch_served("NARROW", NARROW, _layer(REQUEST), batch)
    served = replace(
        NARROW,
        two_sided_window=Support.YES,
        non_causal=Support.YES,
        per_request_causal=Support.YES,
        mm_prefix=Support.YES,
    )
    require_batch_served("WIDE", served, _layer(REQUEST), batch)


def test_a_builder_is_given_no_shares_of_sequences():
    batch = _batch().with_fields(dcp_local_seq_lens=SHARES)
    with pytest.raises(MetadataError, match="dcp_local_seq_lens is given; allowed: None for a"):
        require_batch_served("NARROW", replace(NARROW, dcp=Support.YES), _layer(REQUEST), batch)


def test_a_rule_sees_the_batch_and_the_layer_together():
    def refuse(request, _device):
        if request.is_causal or not request.has_window:
            return None
        return Reason(code="windows_are_causal", value="False", allowed="True")

    ruled = replace(
        NARROW,
        non_causal=Support.YES,
        two_sided_window=Support.YES,
        rules=(Rule(name="windows_are_causal", check=refuse),),
    )
    require_batch_served("RULED", ruled, _layer(REQUEST), _batch())
    with pytest.raises(UnsupportedOptionError, match="windows_are_causal=False"):
        require_batch_served("RULED", ruled, _layer(REQUEST), _batch(causal=False))


def test_causality_means_nothing_to_an_encoder():
    encoders = replace(NARROW, attn_types=frozenset({AttentionType.ENCODER}))
    require_batch_served("ENCODERS", encoders, ENCODER, _batch(causal=False, block_table=None))


def test_a_batch_that_does_not_fit_the_cache():
    layer = _layer(REQUEST)
    with pytest.raises(MetadataError, match="block_table is None"):
        require_batch_served("NARROW", NARROW, layer, _batch(block_table=None))
    with pytest.raises(MetadataError, match="block_size is 32; allowed: 16"):
        require_batch_served("NARROW", NARROW, layer, _batch().with_fields(block_size=32))


@pytest.mark.parametrize(("prefix", "words"), [(8, "multiples of block_size=16"), (32, "differ")])
def test_a_prefix_that_is_not_shared(prefix, words):
    with pytest.raises(MetadataError, match=words):
        require_batch_served("NARROW", NARROW, _layer(REQUEST), _batch(), prefix)


def test_a_prefix_is_for_decoders():
    with pytest.raises(UnsupportedOptionError, match="common_prefix_len=16 with attn_type=encoder"):
        require_batch_served("NARROW", NARROW, ENCODER, _batch(block_table=None), 16)


def test_a_block_table_is_returned():
    batch = _batch()
    assert require_block_table(batch) is batch.block_table
