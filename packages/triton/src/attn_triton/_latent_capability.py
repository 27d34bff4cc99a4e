"""What TRITON_MLA can do on a device: latent attention where Triton compiles for it."""

from __future__ import annotations

from attn_shared.capability import Capability, DeviceLimit, Reason, Rule, SizeSet, Support
from attn_shared.device import DeviceFacts, Vendor
from attn_shared.dtypes import COMPUTE_DTYPES, dtype_name
from attn_shared.request import AttentionRequest
from attn_triton._capability import (
    cache_bytes_of,
    cache_has_the_dtype,
    fp8_is_there,
)
from attn_triton.latent_tiles import LatentWidths, least_latent_bytes

__all__ = ["MLA_CAPABILITY", "MLA_NAME"]

MLA_NAME = "TRITON_MLA"

_FORMATS = ("auto", *COMPUTE_DTYPES, "fp8", "fp8_e4m3", "fp8_e5m2")
_MOST_LATENT = 512


def _latent_is_narrow(request: AttentionRequest, _device: DeviceFacts) -> Reason | None:
    """Sums over a whole latent are in the registers of one program."""
    dims = request.mla
    if dims is None or dims.kv_lora_rank <= _MOST_LATENT:
        return None
    return Reason(
        code="kv_lora_rank", value=str(dims.kv_lora_rank), allowed=f"at most {_MOST_LATENT}"
    )


def _latent_tile_fits(request: AttentionRequest, device: DeviceFacts) -> Reason | None:
    """The smallest tiles must fit what one program may have of shared memory."""
    limit, dims = device.shared_memory_bytes, request.mla
    if limit is None or dims is None or request.kv_cache_dtype not in _FORMATS:
        return None  # nothing to say, or refused for that already
    dtype_bytes = request.dtype.itemsize
    widths = LatentWidths(
        latent=dims.kv_lora_rank,
        rope=dims.qk_rope_head_dim,
        element_bytes=dtype_bytes,
        cache_bytes=cache_bytes_of(request.kv_cache_dtype, dtype_bytes),
    )
    needed = least_latent_bytes(widths)
    if needed <= limit:
        return None
    return Reason(
        code="shared_memory",
        value=f"{needed} bytes for tiles of {dims.kv_lora_rank} + {dims.qk_rope_head_dim} in "
        f"{dtype_name(request.dtype)}",
        allowed=f"at most {limit} bytes on {device.arch}",
    )


MLA_CAPABILITY = Capability(
    devices=(
        DeviceLimit(vendor=Vendor.NVIDIA, at_least=(8, 0)),
        DeviceLimit(vendor=Vendor.AMD),
        DeviceLimit(vendor=Vendor.INTEL),
    ),
    dtypes=frozenset(COMPUTE_DTYPES.values()),
    head_sizes=SizeSet(),
    kv_cache_dtypes=frozenset(_FORMATS),
    block_sizes=(1,),
    preferred_block_size=64,
    is_mla=True,
    non_causal=Support.YES,
    batch_invariant=Support.YES,
    kv_connector=Support.YES,
    lse=Support.YES,
    dcp=Support.YES,
    rules=(
        Rule(name="fp8_on_device", check=fp8_is_there),
        Rule(name="cache_dtype_of_layer", check=cache_has_the_dtype),
        Rule(name="kv_lora_rank", check=_latent_is_narrow),
        Rule(name="shared_memory", check=_latent_tile_fits),
    ),
)
