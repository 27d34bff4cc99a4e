"""What TRITON_ATTN can do on a device: the whole contract where Triton compiles for it."""

from __future__ import annotations

from attn_shared.capability import Capability, DeviceLimit, Reason, Rule, SizeSet, Support
from attn_shared.device import DeviceFacts, Vendor
from attn_shared.dtypes import COMPUTE_DTYPES, KVCacheLayout, dtype_name, parse_dtype
from attn_shared.request import AttentionRequest, AttentionType
from attn_shared.vendor import Fp8Format
from attn_triton.tiles import Widths, least_shared_bytes

__all__ = [
    "CAPABILITY",
    "MAX_HEAD_SIZE",
    "NAME",
    "cache_bytes_of",
    "cache_has_the_dtype",
    "fp8_is_there",
    "lacking_fp8",
]

NAME = "TRITON_ATTN"
MAX_HEAD_SIZE = 512

_FORMATS = ("auto", *COMPUTE_DTYPES, "fp8", "fp8_e4m3", "fp8_e5m2", "int8_per_token_head")
_FIRST_E4M3 = (8, 9)  # before, Triton says "fp8e4nv not supported in this architecture"


def lacking_fp8(kv_cache_dtype: str, device: DeviceFacts) -> str | None:
    """Return what of an fp8 format the device's compiler lacks, as what is allowed instead.

    e4m3 is read in the flavour of the architecture's matrix hardware, as `machine.require_readable`
    holds a cache to: Triton refuses it before NVIDIA's 8.9, and AMD's and Intel's architectures
    without fp8 instructions have no flavour that a cache could be in. torch does not tell Intel's
    architectures apart, and up to Xe3 none has one. e5m2 is fp16 cut short and works everywhere.
    """
    if kv_cache_dtype not in ("fp8", "fp8_e4m3"):
        return None
    capability = device.capability
    if device.vendor is Vendor.NVIDIA and capability and not capability.at_least(*_FIRST_E4M3):
        return f"fp8_e5m2 or another; Triton reads e4m3 from nvidia 8.9 on, this is {capability}"
    # Of a CPU nothing is known: it stands for the interpreter, and for a constructor's device.
    is_amd_without = device.vendor is Vendor.AMD and device.fp8 is Fp8Format.NONE
    if device.vendor is Vendor.INTEL or is_amd_without:
        return f"fp8_e5m2 or another; {device.arch} has no e4m3 flavour"
    return None


def cache_bytes_of(kv_cache_dtype: str, dtype_bytes: int) -> int:
    """Return the bytes of a cache element."""
    is_small = kv_cache_dtype.startswith(("fp8", "int8"))
    if is_small:
        return 1
    return dtype_bytes if kv_cache_dtype == "auto" else parse_dtype(kv_cache_dtype).itemsize


def fp8_is_there(request: AttentionRequest, device: DeviceFacts) -> Reason | None:
    """Refuse an fp8 format that the device's compiler lacks."""
    allowed = lacking_fp8(request.kv_cache_dtype, device)
    if allowed is None:
        return None
    return Reason(code="fp8_on_device", value=request.kv_cache_dtype, allowed=allowed)


def cache_has_the_dtype(request: AttentionRequest, _device: DeviceFacts) -> Reason | None:
    """Refuse a cache of another dtype: what is not quantised is multiplied as it is."""
    name = request.kv_cache_dtype
    if name not in COMPUTE_DTYPES or name == dtype_name(request.dtype):
        return None
    return Reason(
        code="cache_dtype_of_layer",
        value=f"{name} with dtype={dtype_name(request.dtype)}",
        allowed=f"auto, {dtype_name(request.dtype)}, or a quantised format",
    )


def _tile_fits(request: AttentionRequest, device: DeviceFacts) -> Reason | None:
    """The smallest tiles must fit what one program may have of shared memory."""
    limit = device.shared_memory_bytes
    if limit is None or request.use_mla or request.kv_cache_dtype not in _FORMATS:
        return None  # nothing to say, or refused for that already
    dtype_bytes = request.dtype.itemsize
    widths = Widths(
        head_size=request.head_size,
        head_size_v=request.value_size,
        element_bytes=dtype_bytes,
        cache_bytes=cache_bytes_of(request.kv_cache_dtype, dtype_bytes),
    )
    needed = least_shared_bytes(widths)
    if needed <= limit:
        return None
    return Reason(
        code="shared_memory",
        value=f"{needed} bytes for tiles of head sizes {request.head_size} and "
        f"{request.value_size} in {dtype_name(request.dtype)}",
        allowed=f"at most {limit} bytes on {device.arch}",
    )


def _chunks_are_causal(request: AttentionRequest, _device: DeviceFacts) -> Reason | None:
    """A chunk is seen up to the query itself, which only causal rows of a decoder have."""
    if request.chunk_size is None or request.is_causal:
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
    devices=(
        DeviceLimit(vendor=Vendor.NVIDIA, at_least=(8, 0)),
        DeviceLimit(vendor=Vendor.AMD),
        DeviceLimit(vendor=Vendor.INTEL),
    ),
    dtypes=frozenset(COMPUTE_DTYPES.values()),
    head_sizes=SizeSet(minimum=1, maximum=MAX_HEAD_SIZE),
    head_sizes_v=SizeSet(minimum=1, maximum=MAX_HEAD_SIZE),
    kv_cache_dtypes=frozenset(_FORMATS),
    block_sizes=(1,),
    attn_types=frozenset(AttentionType),
    kv_layouts=(KVCacheLayout.NHD, KVCacheLayout.HND),
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
    tolerates_nan_tail=True,
    rules=(
        Rule(name="fp8_on_device", check=fp8_is_there),
        Rule(name="cache_dtype_of_layer", check=cache_has_the_dtype),
        Rule(name="shared_memory", check=_tile_fits),
        Rule(name="chunked_local_causal", check=_chunks_are_causal),
        Rule(name="mm_prefix_decoder", check=_ranges_are_of_decoders),
    ),
)
