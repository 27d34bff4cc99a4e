"""ROCM_AITER_FA: AITER's composable and assembly kernels over pages, and over rows."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attn_rocm._aiter_calls import AiterCalls, Extras
from attn_rocm._aiter_capability import (
    FLASH,
    PAGED_HEAD_SIZE,
    decodes_by_pages,
    flash_capability,
)
from attn_rocm._aiter_gather import gathered, is_in_reach
from attn_rocm._aiter_loaded import load, loaded, require_own_flavour
from attn_rocm._aiter_metadata import CACHE_FREE, AiterFlashMetadataBuilder
from attn_rocm._aiter_scales import Scales
from attn_rocm._aiter_steps import AiterFlashMetadata, DecodeStep, PromptStep, places_of
from attn_shared.alignment import ALIGNMENT_BYTES, aligned, is_aligned
from attn_shared.backend import AttentionBackend, AttentionImpl, AttentionLayer
from attn_shared.cache_views import Views
from attn_shared.call_checks import CallChecker
from attn_shared.capability import Capability
from attn_shared.device import DeviceFacts
from attn_shared.errors import InvalidInputError, UnsupportedOptionError
from attn_shared.kv_cache import AttentionSpec
from attn_shared.served import request_of, require_served
from attn_shared.signed_scale import Scale
from attn_shared.spec import LayerSpec
from attn_triton.portable import portable_for

if TYPE_CHECKING:
    from attn_shared.inventory import Inventory

__all__ = ["AiterFlashBackend", "AiterFlashImpl", "AiterFlashMetadata", "AiterFlashMetadataBuilder"]

_Rows = tuple[Tensor, Tensor]
"""Keys and values."""


class AiterFlashBackend(AttentionBackend):
    """Paged decode, paged prefill, and prefill over rows, by AITER."""

    name = FLASH
    attn_api = ">=1,<2"
    vendor_libraries = ("aiter",)
    description = "AITER's kernels for MI300 and MI350: paged decode, varlen and paged prefill"

    @classmethod
    def capability(cls, device: DeviceFacts, inventory: Inventory) -> Capability:
        """Return what it can do with the release that is installed."""
        return flash_capability(device, inventory)

    @classmethod
    def load_vendor(cls, device: DeviceFacts, inventory: Inventory) -> None:
        """Import AITER.

        Raises:
            VendorMissingError: it does not load, in its own words.
        """
        load(device, inventory)

    @staticmethod
    def get_impl_cls() -> type[AiterFlashImpl]:
        """Return the class that runs one layer."""
        return AiterFlashImpl

    @staticmethod
    def get_builder_cls() -> type[AiterFlashMetadataBuilder]:
        """Return the class that prepares each step."""
        return AiterFlashMetadataBuilder


class AiterFlashImpl(AttentionImpl[AiterFlashMetadata]):
    """Runs one layer."""

    can_return_lse = True

    def __init__(self, spec: LayerSpec) -> None:
        """Bind the release's calls.

        Raises:
            InvalidRequestError: a value that no backend may accept.
            UnsupportedOptionError: the capability does not serve the layer, or its cache is in
                another flavour of fp8 than the device's.
            VendorMissingError: AITER is not loaded.
        """
        super().__init__(spec)
        entry = loaded(FLASH)
        require_served(FLASH, flash_capability(entry.device, entry.inventory), spec)
        require_own_flavour(FLASH, spec.kv_cache_spec)
        _require_addressable(spec)
        self.build = entry.build
        self._is_cache_free = spec.attn_type in CACHE_FREE
        self._decodes_by_pages = decodes_by_pages(request_of(spec))
        self._checker = CallChecker(spec)
        self._scale = Scale(spec.scale)
        self._calls = AiterCalls(replace(spec, scale=self._scale.value), self.build)
        self._portable = portable_for(entry.device)
        self.write_kv = self._portable.write_kv
        cache = spec.kv_cache_spec
        self._is_fp8 = isinstance(cache, AttentionSpec) and cache.is_quantized
        self._scales = Scales()
        self._views = Views()
        self._reads_pages = False  # of the cache whose views are kept

    def __repr__(self) -> str:
        """Read as what runs, and who writes the cache."""
        return f"AiterFlashImpl({self.build}, cache written by {self._portable.name})"

    def forward(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor | None,
        metadata: AiterFlashMetadata,
        output: Tensor | None = None,
        *,
        lse: Tensor | None = None,
    ) -> Tensor:
        """Attend, and return the output; see `AttentionImpl.forward`.

        Raises:
            InvalidInputError: an argument does not fit the layer or the metadata.
            UnsupportedOptionError: the layer object carries an option that it was not built with,
                or an LSE is asked of capped logits.
        """
        self.check_metadata(metadata)
        device = metadata.query_start_loc.device
        self._checker.check_tensors(query, output, lse, metadata.num_actual_tokens, device)
        self._checker.check_layer(layer, device)
        self._check_lse(lse)
        own, pages = self._keys(key, value, kv_cache, metadata, device)
        if output is None:
            output = query.new_empty((len(query), self.spec.num_heads, self.spec.head_size_v))
        count = metadata.num_actual_tokens
        if not count:
            return output
        rows = self._scale.query(query)
        into = output if output.is_contiguous() and is_aligned(output) else torch.empty_like(rows)
        self._attend(layer, rows, own, pages, metadata, into, lse)
        if into is not output:
            output[:count].copy_(into[:count])
        return output

    def _attend(
        self,
        layer: AttentionLayer,
        rows: Tensor,
        own: _Rows | None,
        pages: _Rows | None,
        metadata: AiterFlashMetadata,
        into: Tensor,
        lse: Tensor | None,
    ) -> None:
        """Run the decodes apart where the layer does that, then the rest; set rows without keys."""
        step: PromptStep | None = metadata.whole
        found: Tensor | None = None
        if lse is None and self._decodes_by_pages:
            step = metadata.rest
            if metadata.decode is not None and pages is not None:
                self._decode(layer, rows, pages, metadata.decode, into)
        if step is not None:
            found = self._prompt(layer, rows, own, pages, step, into, with_lse=lse is not None)
        count = metadata.num_actual_tokens
        if metadata.whole.keyless is not None:
            written = None if found is None else found[:, :count]
            metadata.whole.keyless.blank(into[:count], written)
        if lse is not None and found is not None:
            _deliver(layer, lse, found)

    def check_metadata(self, metadata: AiterFlashMetadata) -> None:
        """Refuse another backend's metadata, and a step that was made for another build."""
        hint = f"build it with a {FLASH} builder that was given this layer."
        if not isinstance(metadata, AiterFlashMetadata):
            raise InvalidInputError.for_argument(
                "metadata", f"a {type(metadata).__name__}", "an AiterFlashMetadata", hint=hint
            )
        if metadata.build != self.build:
            raise InvalidInputError.for_argument(
                "metadata", f"made for {metadata.build}", str(self.build), hint=hint
            )

    def _check_lse(self, lse: Tensor | None) -> None:
        if lse is None:
            return
        if self.spec.softcap is not None or self._is_fp8:
            cache = self.spec.kv_cache_spec
            raise UnsupportedOptionError(
                f"lse is given with softcap={self.spec.softcap} and kv_cache_dtype="
                f"{getattr(cache, 'kv_cache_dtype', 'auto')}; allowed: None, for the kernels "
                "approximate tanh, and decode fp8 without an LSE.",
                hint="select with needs_lse=True.",
            )

    def _keys(
        self,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor | None,
        metadata: AiterFlashMetadata,
        device: torch.device,
    ) -> tuple[_Rows | None, _Rows | None]:
        """Return keys and values of the call, and those in pages, after checking both."""
        if self._is_cache_free:
            num_keys = metadata.num_keys
            key, value = self._checker.check_keys(key, value, kv_cache, device, num_keys)
            return (aligned(key[:num_keys]), aligned(value[:num_keys])), None
        self._checker.check_written_keys(key, value, device)
        own = None if key is None or value is None else (key, value)
        if kv_cache is not None and kv_cache is self._views.cache():
            return own, self._views.parts
        cache, spec = self._checker.check_cache(kv_cache, device)
        views = spec.split(cache)
        self._views.keep(cache, (views.key, views.value))
        self._reads_pages = not self._is_fp8 and self._can_read(views.key, views.value)
        return own, (views.key, views.value)

    def _can_read(self, key: Tensor, value: Tensor) -> bool:
        """Whether the paged prefill reads this cache where it is."""
        if self.spec.head_size > PAGED_HEAD_SIZE:
            return False
        is_whole = self._calls.reads_table_of(key) or key.stride(0) % key.stride(1) == 0
        return is_whole and is_in_reach(key) and is_in_reach(value)

    def _decode(
        self, layer: AttentionLayer, rows: Tensor, pages: _Rows, step: DecodeStep, into: Tensor
    ) -> None:
        """Run the leading single queries."""
        query = rows[: step.num_reqs]
        if query.stride(1) != query.shape[2]:
            query = query.contiguous()
        scales = self._scales_of(layer, rows.device) if self._is_fp8 else None
        out = into[: step.num_reqs]
        self._calls.decode(query, *pages, out, step, scales, layer.alibi_slopes)

    def _prompt(
        self,
        layer: AttentionLayer,
        rows: Tensor,
        own: _Rows | None,
        pages: _Rows | None,
        step: PromptStep,
        into: Tensor,
        *,
        with_lse: bool,
    ) -> Tensor | None:
        """Run requests of any length, and return their LSE (Hq, T) if it is wanted."""
        rows, into = rows[step.first_row :], into[step.first_row :]
        extras = Extras(with_lse=with_lse, sinks=layer.sinks, slopes=layer.alibi_slopes)
        starts = step.key_start_loc
        if starts is None and step.brings_keys and not self._is_fp8:
            starts = step.query_start_loc
        if own is not None and starts is not None:
            key, value = (aligned(item[step.first_row :]) for item in own)
            return self._calls.varlen(rows, key, value, into, step, starts, extras)
        if pages is None:
            raise InvalidInputError.for_argument("kv_cache", None, "the layer's cache")
        if self._reads_pages:
            return self._calls.paged(rows, *pages, into, step, extras)
        places = places_of(step, pages[0].shape[1])
        scales = self._scales_of(layer, rows.device) if self._is_fp8 else (None, None)
        key, value = (
            gathered(view, places, scale, self.spec.dtype)
            for view, scale in zip(pages, scales, strict=True)
        )
        return self._calls.varlen(rows, key, value, into, step, places.starts, extras)

    def _scales_of(self, layer: AttentionLayer, device: torch.device) -> tuple[Tensor, Tensor]:
        return self._scales.of(layer.k_scale, device), self._scales.of(layer.v_scale, device)


def _deliver(layer: AttentionLayer, lse: Tensor, found: Tensor) -> None:
    """Write the LSE (Hq, T) as the contract has it: a row without keys has -inf, or its sink."""
    found = found.masked_fill(found == math.inf, -math.inf)
    if layer.sinks is not None:
        found = torch.where(found == -math.inf, layer.sinks[:, None], found)
    lse[:, : found.shape[1]].copy_(found)


def _require_addressable(spec: LayerSpec) -> None:
    """Refuse a cache whose blocks do not begin where the kernels can load."""
    cache = spec.kv_cache_spec
    if isinstance(cache, AttentionSpec) and cache.page_size_bytes % ALIGNMENT_BYTES:
        raise UnsupportedOptionError(
            f"page_size_padded={cache.page_size_padded} is not served by {FLASH}; allowed: a "
            f"multiple of {ALIGNMENT_BYTES} bytes, which its kernels load at once."
        )
