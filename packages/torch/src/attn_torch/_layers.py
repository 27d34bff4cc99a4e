"""A layer's description held against a backend's capability: what selection refuses, so does this.

Implementations call `require_served` in their constructor, so that a layer which no selection
would have sent to them is refused with the same reasons.
"""

from __future__ import annotations

from attn_shared.capability import Capability
from attn_shared.device import preset
from attn_shared.errors import InvalidRequestError, UnsupportedOptionError
from attn_shared.kv_cache import AttentionSpec, MLAAttentionSpec
from attn_shared.request import AttentionRequest
from attn_shared.spec import LayerSpec

__all__ = ["request_of", "require_served"]

_DEVICE_REASON = "device"  # a layer does not know its device


def request_of(spec: LayerSpec) -> AttentionRequest:
    """Return the request that a layer of this description makes.

    Raises:
        InvalidRequestError: a value that no backend may accept.
    """
    cache = spec.kv_cache_spec
    return AttentionRequest(
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        head_size_v=spec.head_size_v,
        dtype=spec.dtype,
        kv_cache_dtype=(
            cache.kv_cache_dtype if isinstance(cache, AttentionSpec | MLAAttentionSpec) else "auto"
        ),
        block_size=None if cache is None else cache.block_size,
        kv_layout=cache.layout if isinstance(cache, AttentionSpec) else None,
        mla=spec.mla,
        has_sinks=spec.has_sinks,
        attn_type=spec.attn_type,
        window=spec.window,
        chunk_size=spec.chunk_size,
        softcap=spec.softcap,
        has_alibi=spec.has_alibi,
        batch_invariant=spec.batch_invariant,
        dcp_size=spec.dcp_size,
        pcp_size=spec.pcp_size,
    )


def require_served(name: str, capability: Capability, spec: LayerSpec) -> None:
    """Refuse a layer that the capability does not serve, whatever the device.

    Args:
        name: of the backend, for the message.
        capability: of the backend.
        spec: of the layer.

    Raises:
        InvalidRequestError: a value that no backend may accept, or a cache that is not the layer's.
        UnsupportedOptionError: with every reason.
    """
    request = request_of(spec)
    found = capability.check(request, preset("genericcpu"))
    reasons = [str(reason) for reason in found if reason.code != _DEVICE_REASON]
    if reasons:
        raise UnsupportedOptionError(
            f"{name} does not serve this layer: {'; '.join(reasons)}.",
            hint="let attn_shared.select choose, or validate_configuration say so beforehand.",
        )
    if not request.is_cache_free:
        _require_own_cache(spec)


def _require_own_cache(spec: LayerSpec) -> None:
    cache = spec.kv_cache_spec
    if not isinstance(cache, AttentionSpec):
        raise InvalidRequestError.for_field(
            "kv_cache_spec", cache, f"an AttentionSpec with attn_type={spec.attn_type}"
        )
    for field in ("num_kv_heads", "head_size", "head_size_v"):
        if getattr(cache, field) != getattr(spec, field):
            raise InvalidRequestError.for_field(
                f"kv_cache_spec.{field}",
                getattr(cache, field),
                f"{getattr(spec, field)}, the layer's",
            )
