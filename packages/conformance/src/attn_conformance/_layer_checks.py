"""What the reference backend refuses: layers that it does not serve, calls that do not fit.

Each refusal names the argument, its value and what is allowed, before anything is computed.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attn_shared.backend import AttentionLayer
from attn_shared.capability import Capability
from attn_shared.device import preset
from attn_shared.errors import InvalidInputError, InvalidRequestError, UnsupportedOptionError
from attn_shared.kv_cache import AttentionSpec
from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.request import AttentionRequest, AttentionType
from attn_shared.spec import LayerSpec

__all__ = ["check_call", "check_layer", "check_step"]

_CACHE_FREE = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)


def check_layer(name: str, capability: Capability, spec: LayerSpec) -> None:
    """Refuse a layer that the capability does not serve.

    Raises:
        InvalidRequestError: a value that no backend may accept.
        UnsupportedOptionError: with every reason.
    """
    if not math.isfinite(spec.scale):
        raise InvalidRequestError.for_field("scale", spec.scale, "a finite number")
    reasons = capability.check(_request_of(spec), preset("genericcpu"))
    if reasons:
        raise UnsupportedOptionError(
            f"{name} does not serve this layer: {'; '.join(map(str, reasons))}."
        )


def _request_of(spec: LayerSpec) -> AttentionRequest:
    cache = spec.kv_cache_spec if isinstance(spec.kv_cache_spec, AttentionSpec) else None
    return AttentionRequest(
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        head_size_v=spec.head_size_v,
        dtype=spec.dtype,
        kv_cache_dtype="auto" if cache is None else cache.kv_cache_dtype,
        block_size=None if cache is None else cache.block_size,
        kv_layout=None if cache is None else cache.layout,
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


def check_step(
    name: str, capability: Capability, layer: LayerSpec, common: CommonAttentionMetadata
) -> None:
    """Refuse a batch with what the capability does not serve and no layer's description says.

    Raises:
        InvalidInputError: a layer with a cache has no block table.
        UnsupportedOptionError: with every reason.
    """
    if layer.attn_type not in _CACHE_FREE:
        _require("block_table", common.block_table)
    is_decoder = layer.attn_type is AttentionType.DECODER
    request = _request_of(layer).with_options(
        non_causal=is_decoder and common.causal is False,
        per_request_causal=isinstance(common.causal, Tensor),
        use_mm_prefix=any(common.mm_prefix_ranges.values()),
        dcp_size=layer.dcp_size if common.dcp_local_seq_lens is None else max(2, layer.dcp_size),
    )
    reasons = capability.check(request, preset("genericcpu"))
    if reasons:
        raise UnsupportedOptionError(
            f"{name} does not serve this batch: {'; '.join(map(str, reasons))}."
        )


def check_call(
    spec: LayerSpec,
    layer: AttentionLayer,
    *,
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    kv_cache: Tensor | None,
    common: CommonAttentionMetadata,
    output: Tensor | None,
    lse: Tensor | None,
) -> None:
    """Refuse tensors of other shapes, dtypes or devices than the layer's.

    Raises:
        InvalidInputError: names the argument, its value and what is allowed.
    """
    rows, device = query.shape[0] if query.ndim else 0, common.query_start_loc.device
    _check("query", query, (rows, spec.num_heads, spec.head_size), spec.dtype, device)
    if rows < common.num_actual_tokens:
        raise InvalidInputError.for_argument(
            "query rows", rows, f"at least {common.num_actual_tokens}, the batch's tokens"
        )
    _check_keys(spec, key, value, device)
    _check("output", output, (rows, spec.num_heads, spec.head_size_v), spec.dtype, device)
    _check("lse", lse, (spec.num_heads, rows), torch.float32, device)
    for name, is_needed in (("sinks", spec.has_sinks), ("alibi_slopes", spec.has_alibi)):
        _check_per_head(name, getattr(layer, name), spec.num_heads, device, is_needed=is_needed)
    if spec.attn_type in _CACHE_FREE:
        _require("key", key)
        _require("value", value)
    else:
        _check_cache(spec, _require("kv_cache", kv_cache), device)
        _check_scales(spec, layer)


def _check_keys(
    spec: LayerSpec, key: Tensor | None, value: Tensor | None, device: torch.device
) -> None:
    if (key is None) != (value is None):
        raise InvalidInputError.for_argument(
            "value" if value is None else "key", None, "a tensor where the other is one"
        )
    if key is not None and value is not None:
        count = key.shape[0] if key.ndim else 0
        _check("key", key, (count, spec.num_kv_heads, spec.head_size), spec.dtype, device)
        _check("value", value, (count, spec.num_kv_heads, spec.head_size_v), spec.dtype, device)


def _check(
    name: str,
    tensor: Tensor | None,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    if tensor is None:
        return
    if tuple(tensor.shape) != shape:
        raise InvalidInputError.for_argument(f"{name} shape", tuple(tensor.shape), str(shape))
    if tensor.dtype is not dtype:
        raise InvalidInputError.for_argument(f"{name} dtype", tensor.dtype, str(dtype))
    if tensor.device != device:
        raise InvalidInputError.for_argument(f"{name} device", tensor.device, str(device))


def _require(name: str, tensor: Tensor | None) -> Tensor:
    if tensor is None:
        raise InvalidInputError.for_argument(name, None, "a tensor")
    return tensor


def _check_per_head(
    name: str, tensor: Tensor | None, heads: int, device: torch.device, *, is_needed: bool
) -> None:
    if is_needed:
        _check(name, _require(name, tensor), (heads,), torch.float32, device)
    elif tensor is not None:
        raise InvalidInputError.for_argument(
            name, tuple(tensor.shape), f"None: the layer was built without has_{name.split('_')[0]}"
        )


def _check_cache(spec: LayerSpec, kv_cache: Tensor, device: torch.device) -> None:
    if not isinstance(spec.kv_cache_spec, AttentionSpec):
        raise InvalidInputError.for_argument("kv_cache_spec", spec.kv_cache_spec, "AttentionSpec")
    spec.kv_cache_spec.check(kv_cache)
    if kv_cache.device != device:
        raise InvalidInputError.for_argument("kv_cache device", kv_cache.device, str(device))


def _check_scales(spec: LayerSpec, layer: AttentionLayer) -> None:
    cache = spec.kv_cache_spec
    if isinstance(cache, AttentionSpec) and cache.is_quantized:
        return
    for name in ("k_scale", "v_scale"):
        scale = getattr(layer, name)
        is_one = bool((scale == 1).all()) if isinstance(scale, Tensor) else scale == 1.0
        if not is_one:
            raise InvalidInputError.for_argument(name, scale, "1.0 with an unquantised cache")
