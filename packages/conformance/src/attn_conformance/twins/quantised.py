"""Twins that are wrong about quantised caches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attn_conformance.reference_backend import ReferenceCall, ReferenceImpl
from attn_conformance.twins.twin import Twin
from attn_shared.backend import AttentionLayer
from attn_shared.kv_cache import KVViews
from attn_shared.quantization import FP8_DTYPES
from attn_shared.reference import ReferenceResult
from attn_shared.request import AttentionType

__all__ = ["TWINS"]


class _OtherArguments(ReferenceImpl):
    """Reads the cache with some arguments changed."""

    def changed(self, arguments: dict[str, Any]) -> dict[str, Any]:
        raise NotImplementedError

    def paged_arguments(self, call: ReferenceCall) -> dict[str, Any]:
        arguments = super().paged_arguments(call)
        return {**arguments, **self.changed(arguments)}


class UnscaledKeys(Twin):
    """Drops the scale of stored keys."""

    breaks = ("fp8_scales", "fp8_scales_per_head", "combinations")

    class impl(_OtherArguments):
        def changed(self, arguments: dict[str, Any]) -> dict[str, Any]:
            return {"k_scale": 1.0}


class UnscaledValues(Twin):
    """Drops the scale of stored values."""

    breaks = ("fp8_scales", "fp8_scales_per_head", "combinations")

    class impl(_OtherArguments):
        def changed(self, arguments: dict[str, Any]) -> dict[str, Any]:
            return {"v_scale": 1.0}


class KeyScaleForBoth(Twin):
    """Takes the scale of keys for values too."""

    breaks = ("fp8_scales", "fp8_scales_per_head")

    class impl(_OtherArguments):
        def changed(self, arguments: dict[str, Any]) -> dict[str, Any]:
            return {"v_scale": arguments["k_scale"]}


class FirstHeadsScale(Twin):
    """Takes the first head's scale for all."""

    breaks = ("fp8_scales_per_head",)

    class impl(_OtherArguments):
        def changed(self, arguments: dict[str, Any]) -> dict[str, Any]:
            scales = {name: arguments[name] for name in ("k_scale", "v_scale")}
            return {
                name: scale[:1] if isinstance(scale, Tensor) else scale
                for name, scale in scales.items()
            }


class Int8Of128(Twin):
    """Reads int8 with a scale of max abs / 128."""

    breaks = ("int8", "cache_formats")

    class impl(_OtherArguments):
        def changed(self, arguments: dict[str, Any]) -> dict[str, Any]:
            scales = {name: arguments[name] for name in ("key_scales", "value_scales")}
            return {
                name: None if scale is None else scale * (127 / 128)
                for name, scale in scales.items()
            }


class Int8ByToken(Twin):
    """Reads all heads of a token with the first head's scale."""

    breaks = ("int8", "cache_formats")

    class impl(_OtherArguments):
        def changed(self, arguments: dict[str, Any]) -> dict[str, Any]:
            scales = {name: arguments[name] for name in ("key_scales", "value_scales")}
            return {
                name: None if scale is None else scale[..., :1].expand(scale.shape)
                for name, scale in scales.items()
            }


class CastWithoutSaturation(Twin):
    """Stores NaN for what does not fit, as a cast without saturation does."""

    breaks = ("fp8_saturates",)

    class impl(ReferenceImpl):
        def do_kv_cache_update(
            self,
            layer: AttentionLayer,
            key: Tensor,
            value: Tensor,
            kv_cache: Tensor,
            slot_mapping: Tensor,
        ) -> None:
            if kv_cache.dtype in FP8_DTYPES:
                limit = torch.finfo(kv_cache.dtype).max
                key = _nan_beyond(key, layer.k_scale, limit)
                value = _nan_beyond(value, layer.v_scale, limit)
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)


def _nan_beyond(rows: Tensor, scale: float | Tensor, limit: float) -> Tensor:
    per_head = torch.as_tensor(scale, dtype=torch.float32).reshape(-1, 1)
    return torch.where((rows / per_head).abs() > limit, torch.nan, rows)


class OneFlavour(Twin):
    """Reads every e4m3 cache as float8_e4m3fn."""

    breaks = ("fp8_flavours",)

    class impl(ReferenceImpl):
        def views(self, call: ReferenceCall) -> KVViews:
            views = super().views(call)
            if views.key.dtype is not torch.float8_e4m3fnuz:
                return views
            key, value = (view.view(torch.float8_e4m3fn) for view in views[:2])
            return views._replace(key=key, value=value)


class E5m2AsE4m3(Twin):
    """Reads every fp8 cache as e4m3."""

    breaks = ("cache_formats", "fp8_scales")

    class impl(ReferenceImpl):
        def views(self, call: ReferenceCall) -> KVViews:
            views = super().views(call)
            if views.key.dtype is not torch.float8_e5m2:
                return views
            key, value = (view.view(torch.float8_e4m3fn) for view in views[:2])
            return views._replace(key=key, value=value)


class QuantisedQuery(Twin):
    """Quantises the query as well, where the cache is fp8."""

    breaks = ("cache_formats",)

    class impl(ReferenceImpl):
        def attend(self, call: ReferenceCall) -> ReferenceResult:
            if call.kv_cache is None or call.kv_cache.dtype not in FP8_DTYPES:
                return super().attend(call)
            query = call.query.to(call.kv_cache.dtype).to(call.query.dtype)
            return super().attend(replace(call, query=query))


class ReadsFreshTokens(Twin):
    """Reads the step's new tokens as they were handed over, and does not say so."""

    breaks = ("new_tokens_as_stored",)

    class impl(ReferenceImpl):
        def paged_arguments(self, call: ReferenceCall) -> dict[str, Any]:
            arguments = super().paged_arguments(call)
            if self.spec.attn_type is AttentionType.DECODER:
                arguments |= {"fresh_key": call.key, "fresh_value": call.value}
            return arguments


TWINS: tuple[type[Twin], ...] = (
    UnscaledKeys,
    UnscaledValues,
    KeyScaleForBoth,
    FirstHeadsScale,
    Int8Of128,
    Int8ByToken,
    CastWithoutSaturation,
    OneFlavour,
    E5m2AsE4m3,
    QuantisedQuery,
    ReadsFreshTokens,
)
