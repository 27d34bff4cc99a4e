"""What TORCH_SDPA can do: everything everywhere, since torch is all it needs."""

from __future__ import annotations

from dataclasses import replace

from attn_shared.capability import Capability, DeviceLimit, Reason, Rule, SizeSet, Support
from attn_shared.device import DeviceFacts, Vendor
from attn_shared.dtypes import COMPUTE_DTYPES, KVCacheLayout
from attn_shared.request import AttentionRequest, AttentionType

__all__ = ["CAPABILITY", "NAME", "capability_on"]

NAME = "TORCH_SDPA"


def _chunks_are_causal(request: AttentionRequest, _device: DeviceFacts) -> Reason | None:
    """A chunk is seen up to the query itself, which only causal rows of a decoder have."""
    is_causal = not (request.non_causal or request.per_request_causal)
    if request.chunk_size is None or (is_causal and request.attn_type is AttentionType.DECODER):
        return None
    return Reason(
        code="chunked_local_causal",
        value=f"chunk_size={request.chunk_size}, attn_type={request.attn_type}",
        allowed="causal decoder rows with chunk_size",
    )


def _ranges_are_of_decoders(request: AttentionRequest, _device: DeviceFacts) -> Reason | None:
    """Multimodal ranges widen a causal mask, which encoders and cross-attention do not have."""
    if not request.use_mm_prefix or request.attn_type is AttentionType.DECODER:
        return None
    return Reason(
        code="mm_prefix_decoder", value=str(request.attn_type), allowed="decoder with mm_prefix"
    )


CAPABILITY = Capability(
    devices=tuple(DeviceLimit(vendor=vendor) for vendor in Vendor),
    dtypes=frozenset(COMPUTE_DTYPES.values()),
    head_sizes=SizeSet(minimum=1, maximum=576),
    head_sizes_v=SizeSet(minimum=1, maximum=576),
    kv_cache_dtypes=frozenset(
        {
            "auto",
            "float16",
            "bfloat16",
            "float32",
            "fp8",
            "fp8_e4m3",
            "fp8_e5m2",
            "int8_per_token_head",
        }
    ),
    block_sizes=(1,),
    attn_types=frozenset(AttentionType),
    kv_layouts=(KVCacheLayout.NHD, KVCacheLayout.HND),
    sinks=Support.SLOW,
    window=Support.YES,
    two_sided_window=Support.YES,
    chunked_local=Support.YES,
    softcap=Support.SLOW,
    alibi=Support.SLOW,
    non_causal=Support.YES,
    per_request_causal=Support.YES,
    mm_prefix=Support.YES,
    batch_invariant=Support.YES,
    kv_connector=Support.YES,
    per_head_quant_scales=Support.YES,
    lse=Support.SLOW,
    dcp=Support.SLOW,
    pcp=Support.YES,
    needs_exact_host_lengths=True,
    rules=(
        Rule(name="chunked_local_causal", check=_chunks_are_causal),
        Rule(name="mm_prefix_decoder", check=_ranges_are_of_decoders),
    ),
)
"""SLOW is what scaled_dot_product_attention has no argument for: see `attn_torch._exact`."""

_ON_CPU = replace(CAPABILITY, kv_layouts=(KVCacheLayout.HND, KVCacheLayout.NHD))


def capability_on(device: DeviceFacts) -> Capability:
    """Return the capability with the layout first that is gathered faster.

    A CPU's kernel reads head-major keys faster, and blocks of them are gathered head-major at no
    cost; elsewhere the rows of whole tokens make fewer and longer copies.
    """
    return _ON_CPU if device.vendor is Vendor.CPU else CAPABILITY
