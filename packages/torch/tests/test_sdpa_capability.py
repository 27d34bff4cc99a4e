"""What TORCH_SDPA says it can do, on every vendor's devices."""

from __future__ import annotations

import pytest
import torch

from attn_shared.device import PRESETS, preset
from attn_shared.dtypes import KVCacheLayout
from attn_shared.errors import UnsupportedOptionError
from attn_shared.inventory import Inventory
from attn_shared.kv_cache import spec_for
from attn_shared.request import AttentionRequest, AttentionType, MLADims
from attn_shared.spec import LayerSpec
from attn_torch._sdpa_capability import CAPABILITY
from attn_torch.backends.torch_sdpa import TorchSDPABackend, TorchSDPAImpl

PLAIN = AttentionRequest(num_heads=8, num_kv_heads=2, head_size=64, block_size=16)
DEVICE = preset("h200")

SERVED = [
    {},
    {"head_size": 1, "head_size_v": 576},
    {"dtype": torch.float32, "kv_cache_dtype": "int8_per_token_head"},
    {"kv_cache_dtype": "fp8_e5m2", "per_head_quant_scales": True},
    {"block_size": 1, "kv_layout": KVCacheLayout.NHD},
    {"attn_type": AttentionType.ENCODER_DECODER, "kv_layout": KVCacheLayout.HND},
    {"attn_type": AttentionType.ENCODER_ONLY, "window": (3, 3)},
    {"has_sinks": True, "has_alibi": True, "softcap": 20.0, "window": (3, 0), "needs_lse": True},
    {"chunk_size": 64, "use_mm_prefix": True, "use_kv_connector": True},
    {"non_causal": True, "window": (5, 5), "batch_invariant": True},
    {"per_request_causal": True},
    {"dcp_size": 4, "window": (5, 0), "has_sinks": True},
    {"pcp_size": 2, "window": (5, 0), "chunk_size": 64},
]

REFUSED = [
    ({"head_size": 577}, "head_size"),
    ({"kv_cache_dtype": "nvfp4"}, "kv_cache_dtype"),
    ({"dcp_size": 2, "chunk_size": 64}, "dcp_chunked_local"),
    ({"pcp_size": 2, "use_mm_prefix": True}, "pcp_mm_prefix"),
    ({"use_sparse": True}, "sparse"),
    ({"num_kv_heads": 1, "head_size": 576, "mla": MLADims()}, "mla"),
    ({"chunk_size": 4, "non_causal": True}, "chunked_local_causal"),
    ({"chunk_size": 4, "per_request_causal": True}, "chunked_local_causal"),
    ({"chunk_size": 4, "attn_type": AttentionType.ENCODER_DECODER}, "chunked_local_causal"),
    ({"use_mm_prefix": True, "attn_type": AttentionType.ENCODER}, "mm_prefix_decoder"),
]


def _reasons(request: AttentionRequest, device=DEVICE) -> list[str]:
    found = TorchSDPABackend.validate_configuration(request, device, Inventory())
    return [reason.code for reason in found]


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_device_is_served(name):
    assert _reasons(PLAIN, preset(name)) == []


@pytest.mark.parametrize("options", SERVED, ids=str)
def test_served(options):
    assert _reasons(PLAIN.with_options(**options)) == []


@pytest.mark.parametrize(("options", "code"), REFUSED, ids=str)
def test_refused(options, code):
    assert _reasons(PLAIN.with_options(**options)) == [code]


def test_the_layout_that_is_gathered_faster_comes_first():
    def first(name: str) -> KVCacheLayout:
        return TorchSDPABackend.capability(preset(name), Inventory()).kv_layouts[0]

    assert first("genericcpu") is KVCacheLayout.HND
    assert first("h200") is first("mi300x") is first("b60") is KVCacheLayout.NHD


def test_what_leaves_the_fast_path_is_called_slow():
    request = PLAIN.with_options(
        has_sinks=True, has_alibi=True, softcap=9.0, needs_lse=True, window=(3, 0)
    )
    assert set(CAPABILITY.slow_features(request)) == {"sink", "alibi", "softcap", "lse"}


def _layer(request: AttentionRequest) -> LayerSpec:
    cache = None if request.is_cache_free else spec_for(request, block_size=16)
    return LayerSpec.from_request(request, scale=0.1, kv_cache_spec=cache)


@pytest.mark.parametrize("options", SERVED, ids=str)
def test_what_selection_admits_can_be_built(options):
    layer = _layer(PLAIN.with_options(**({"block_size": 16} | options)))
    assert TorchSDPAImpl(layer).spec is layer


@pytest.mark.parametrize(
    "options",
    [{"head_size": 577}, {"chunk_size": 64, "dcp_size": 2}],
    ids=str,
)
def test_what_selection_refuses_cannot_be_built(options):
    *_, name = options
    with pytest.raises(UnsupportedOptionError, match=f"TORCH_SDPA.*{name.removesuffix('_size')}"):
        TorchSDPAImpl(_layer(PLAIN.with_options(**options)))


def test_the_backend_names_its_parts():
    assert TorchSDPABackend.get_name() == "TORCH_SDPA"
    assert TorchSDPABackend.attn_api == ">=1,<2"
    assert TorchSDPABackend.get_impl_cls() is TorchSDPAImpl
    assert TorchSDPAImpl.can_return_lse
    assert TorchSDPAImpl.lse_base_on_e
    assert TorchSDPABackend.get_required_kv_cache_layout(DEVICE, Inventory()) is None
