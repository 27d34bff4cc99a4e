"""What FLEX_ATTENTION declares, and that its constructors refuse the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attn_torch_testing import Case

from attn_shared.arch import parse_arch
from attn_shared.capability import Support
from attn_shared.device import DeviceFacts, preset
from attn_shared.errors import (
    UnsupportedOptionError,
)
from attn_shared.inventory import Inventory
from attn_shared.request import AttentionRequest, AttentionType, MLADims
from attn_shared.spec import BuildConfig, LayerSpec
from attn_torch.backends.flex_attention import (
    FlexAttentionBackend,
    FlexAttentionImpl,
    FlexMetadataBuilder,
)

CPU = torch.device("cpu")
CPU = torch.device("cpu")
F32 = torch.float32


REQUEST = AttentionRequest(num_heads=4, num_kv_heads=2, head_size=64, block_size=16)


@pytest.mark.parametrize("device", ["genericcpu", "spr", "a100", "h200", "b200", "mi300x", "b60"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"head_size": 192, "head_size_v": 128},
        {"has_sinks": True, "softcap": 30.0, "has_alibi": True, "needs_lse": True},
        {"non_causal": True, "window": (3, 3)},
        {"per_request_causal": True, "use_mm_prefix": True},
        {"attn_type": AttentionType.ENCODER_ONLY, "block_size": None},
        {"dtype": F32, "kv_cache_dtype": "bfloat16", "block_size": 7},
        {"use_kv_connector": True, "chunk_size": 100},
    ],
    ids=str,
)
def test_served_requests(device: str, changes: dict[str, Any]) -> None:
    request = REQUEST.with_options(**changes)
    reasons = FlexAttentionBackend.validate_configuration(request, preset(device), Inventory())
    assert reasons == ()


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype"),
        ({"kv_cache_dtype": "int8_per_token_head"}, "kv_cache_dtype"),
        ({"batch_invariant": True}, "batch_invariance"),
        ({"dcp_size": 2}, "dcp"),
        ({"pcp_size": 2}, "pcp"),
        ({"chunk_size": 8, "attn_type": AttentionType.ENCODER_DECODER}, "chunks_are_causal"),
        (
            {"mla": MLADims(), "head_size": 576, "num_kv_heads": 1, "block_size": 64},
            "mla",
        ),
    ],
    ids=str,
)
def test_selection_and_constructors_refuse_alike(changes: dict[str, Any], code: str) -> None:
    request = REQUEST.with_options(**changes)
    cpu = preset("genericcpu")
    reasons = FlexAttentionBackend.validate_configuration(request, cpu, Inventory())
    assert code in {reason.code for reason in reasons}
    spec = LayerSpec.from_request(request, scale=1.0, kv_cache_spec=_cache_spec(request))
    with pytest.raises(UnsupportedOptionError, match=f"FLEX_ATTENTION does not serve.*{code}="):
        FlexAttentionImpl(spec)


def _cache_spec(request: AttentionRequest) -> Any:
    from attn_shared.kv_cache import spec_for

    return spec_for(request, block_size=request.block_size or 16)


@pytest.mark.parametrize(
    ("width", "is_served"), [(8, False), (16, True), (512, True), (576, False)]
)
def test_gpus_have_narrower_limits_on_heads(width: int, is_served: bool) -> None:
    request = REQUEST.with_options(head_size=width)
    reasons = FlexAttentionBackend.validate_configuration(request, preset("h100"), Inventory())
    assert [reason.code for reason in reasons] == ([] if is_served else ["head_size"])
    batch = Case(query_lens=(1,), seq_lens=(1,), head_size=width).build()
    arguments = (batch.spec.kv_cache_spec, {"layer": batch.spec}, BuildConfig())
    if is_served:
        FlexMetadataBuilder(*arguments, torch.device("cuda"))
    else:
        with pytest.raises(UnsupportedOptionError, match=f"head_size={width}.*16 to 512"):
            FlexMetadataBuilder(*arguments, torch.device("cuda"))
    FlexMetadataBuilder(*arguments, CPU)


def test_old_nvidia_gpus_are_refused() -> None:
    turing = parse_arch("sm_75")
    facts = DeviceFacts(
        vendor=turing.vendor,
        name="T4",
        arch=turing.canonical,
        capability=turing.capability,
        arch_family=turing.family,
        fp8=turing.fp8,
    )
    reasons = FlexAttentionBackend.validate_configuration(REQUEST, facts, Inventory())
    assert [reason.code for reason in reasons] == ["device"]


def test_cpu_features_are_declared_slow() -> None:
    capability = FlexAttentionBackend.capability(preset("genericcpu"), Inventory())
    assert capability.softcap is Support.SLOW
    assert capability.needs_exact_host_lengths
    assert FlexAttentionBackend.capability(preset("h200"), Inventory()).softcap is Support.YES
