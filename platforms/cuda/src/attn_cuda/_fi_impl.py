"""What runs one layer on FlashInfer, whichever of its kernels the step's parts are of."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from attn_cuda import _fi_loaded
from attn_cuda._fi_capability import NAME, capability_on
from attn_cuda._fi_key import Call, plan_key
from attn_cuda._fi_metadata import FlashInferMetadata
from attn_cuda._fi_scales import Scales, Scaling, scaling_of
from attn_shared.alignment import ALIGNMENT_BYTES
from attn_shared.backend import AttentionImpl, AttentionLayer
from attn_shared.cache_views import Views
from attn_shared.call_checks import CallChecker
from attn_shared.capability import Capability, Support
from attn_shared.dtypes import KVCacheLayout
from attn_shared.errors import InvalidInputError, UnsupportedOptionError
from attn_shared.kv_cache import AttentionSpec, NVFP4AttentionSpec
from attn_shared.served import require_served
from attn_shared.signed_scale import Scale
from attn_shared.spec import LayerSpec
from attn_triton.portable import portable_for

__all__ = ["FlashInferImpl"]


class FlashInferImpl(AttentionImpl[FlashInferMetadata]):
    """Runs one layer by the plans of its group."""

    can_return_lse = True
    backend_name: ClassVar[str] = NAME

    def __init__(self, spec: LayerSpec) -> None:
        """Keep what every call needs.

        Raises:
            InvalidRequestError: a value that no backend may accept.
            UnsupportedOptionError: the layer is not served.
            VendorMissingError: the process has loaded no FlashInfer.
        """
        super().__init__(spec)
        loaded = _fi_loaded.loaded(self.backend_name)
        capability = self._capability_of(loaded)
        require_served(self.backend_name, capability, spec)
        _require_addressable(self.backend_name, spec)
        self._key = plan_key(spec)
        self.can_return_lse = capability.lse is not Support.NO
        self._checker = CallChecker(spec, returns_lse=self.can_return_lse)
        self._scale = Scale(spec.scale)
        self._is_nvfp4 = isinstance(spec.kv_cache_spec, NVFP4AttentionSpec)
        if not self._is_nvfp4:  # which torch writes
            self.write_kv = portable_for(loaded.device).write_kv
        self._is_head_major = self._key.layout is KVCacheLayout.HND
        self._scales = Scales(self.backend_name) if self._key.is_quantized else None
        self._numbers = (1.0, 1.0, 1.0)  # of keys, values and query, as last seen
        self._scaling = scaling_of(self._key.scale, self._key.dtype, *self._numbers)
        self._views = Views()

    @staticmethod
    def _capability_of(loaded: _fi_loaded.Loaded) -> Capability:
        return capability_on(loaded.device, loaded.inventory)

    def forward(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor | None,
        metadata: FlashInferMetadata,
        output: Tensor | None = None,
        *,
        lse: Tensor | None = None,
    ) -> Tensor:
        """Attend, and return the output; see `AttentionImpl.forward`.

        Raises:
            InvalidInputError: an argument does not fit the layer or the metadata.
            UnsupportedOptionError: the layer object carries an option that it was not built with,
                or an LSE is asked for under a softcap.
        """
        self.check_metadata(metadata)
        device = metadata.device
        self._checker.check_call(
            layer, query, key, value, output, lse, metadata.num_actual_tokens, device
        )
        if lse is not None and self.spec.softcap is not None:
            raise UnsupportedOptionError(
                f"lse is given with softcap={self.spec.softcap}; allowed: None, for the kernels "
                "approximate tanh.",
                hint="select with needs_lse=True.",
            )
        target = output
        if target is None or not target.is_contiguous() or target.data_ptr() % ALIGNMENT_BYTES:
            target = query.new_empty(query.shape)
        call = Call(
            query.shape[0],
            self._scale.query(query),
            self._cache(kv_cache, device),
            target,
            lse,
            None if key is None or value is None else (key, value),
            self._scaling if self._scales is None else self._scaling_of(self._scales.of(layer)),
            layer.sinks,
            self._cache_scales(kv_cache) if self._is_nvfp4 else None,
        )
        for part in metadata.parts:
            part.run(call)
        if output is None or target is output:
            return target
        rows = metadata.num_actual_tokens
        output[:rows].copy_(target[:rows])
        return output

    def _scaling_of(self, numbers: tuple[float, float, float]) -> Scaling:
        if numbers != self._numbers:
            self._scaling = scaling_of(self._key.scale, self._key.dtype, *numbers)
            self._numbers = numbers
        return self._scaling

    def check_metadata(self, metadata: FlashInferMetadata) -> None:
        """Refuse another backend's metadata, and a step that was planned for another layer."""
        hint = f"build it with a {self.backend_name} builder that was given this layer."
        if not isinstance(metadata, FlashInferMetadata):
            raise InvalidInputError.for_argument(
                "metadata", f"a {type(metadata).__name__}", "a FlashInferMetadata", hint=hint
            )
        if metadata.key is not self._key or metadata.backend != self.backend_name:
            raise InvalidInputError.for_argument(
                "metadata",
                f"{metadata.backend} planned for {metadata.key}",
                f"{self.backend_name} for {self._key}",
                hint=hint,
            )

    def _cache(self, kv_cache: Tensor | None, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return keys and values in the cache's own order, after checking the cache."""
        if kv_cache is not None and kv_cache is self._views.cache():
            return self._views.parts
        cache, spec = self._checker.check_cache(kv_cache, device)
        views = spec.split(cache)
        parts = self._in_order(views.key, views.value)
        self._views.keep(cache, parts)
        return parts

    def _cache_scales(self, kv_cache: Tensor | None) -> tuple[Tensor, Tensor] | None:
        spec = self.spec.kv_cache_spec
        if kv_cache is None or not isinstance(spec, AttentionSpec):
            return None
        views = spec.split(kv_cache)
        if views.key_scale is None or views.value_scale is None:
            return None
        return self._in_order(views.key_scale, views.value_scale)

    def _in_order(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return views (P, S, Hkv, ...) in the cache's own order."""
        if self._is_head_major:
            return key.transpose(1, 2), value.transpose(1, 2)
        return key, value


def _require_addressable(name: str, spec: LayerSpec) -> None:
    """Refuse a cache that the kernels would read at wrong addresses, or in another flavour."""
    cache = spec.kv_cache_spec
    if not isinstance(cache, AttentionSpec):
        return
    if cache.page_size_bytes % ALIGNMENT_BYTES:
        raise UnsupportedOptionError(
            f"page_size_padded={cache.page_size_padded} is not served by {name}; allowed: a "
            f"multiple of {ALIGNMENT_BYTES} bytes, which its kernels load at once."
        )
    if cache.dtype is torch.float8_e4m3fnuz:
        raise UnsupportedOptionError(
            f"a cache of {cache.dtype} is not served by {name}; allowed: torch.float8_e4m3fn."
        )
