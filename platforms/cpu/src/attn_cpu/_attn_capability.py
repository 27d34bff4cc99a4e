"""What CPU_ATTN can do: the same on every CPU, whose instruction set decides how fast."""

from __future__ import annotations

from attn_shared.capability import Capability, DeviceLimit, Reason, Rule, SizeSet, Support
from attn_shared.device import DeviceFacts, Vendor
from attn_shared.dtypes import COMPUTE_DTYPES, KVCacheLayout
from attn_shared.request import AttentionRequest, AttentionType

__all__ = ["CAPABILITY", "NAME"]

NAME = "CPU_ATTN"


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


_HEAD_SIZES = SizeSet(minimum=32, maximum=576, multiple_of=8)

CAPABILITY = Capability(
    devices=(DeviceLimit(vendor=Vendor.CPU),),
    dtypes=frozenset(COMPUTE_DTYPES.values()),
    head_sizes=_HEAD_SIZES,
    head_sizes_v=_HEAD_SIZES,
    kv_cache_dtypes=frozenset({"auto", "fp8", "fp8_e4m3", "fp8_e5m2", "int8_per_token_head"}),
    block_sizes=(1,),
    preferred_block_size=128,
    attn_types=frozenset(AttentionType),
    kv_layouts=(KVCacheLayout.HND, KVCacheLayout.NHD),
    sinks=Support.YES,
    window=Support.YES,
    two_sided_window=Support.YES,
    chunked_local=Support.YES,
    softcap=Support.YES,
    alibi=Support.YES,
    non_causal=Support.YES,
    per_request_causal=Support.YES,
    mm_prefix=Support.YES,
    batch_invariant=Support.YES,
    kv_connector=Support.YES,
    per_head_quant_scales=Support.YES,
    lse=Support.YES,
    dcp=Support.YES,
    pcp=Support.YES,
    rules=(
        Rule(name="chunked_local_causal", check=_chunks_are_causal),
        Rule(name="mm_prefix_decoder", check=_ranges_are_of_decoders),
    ),
)
"""Blocks may be of any size; in blocks of 128 a head's keys lie together for longest."""
