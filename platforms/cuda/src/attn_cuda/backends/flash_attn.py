"""FLASH_ATTN: FlashAttention 2, 3 and 4, whichever build serves a layer on its device."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attn_cuda import _fa_loaded
from attn_cuda._fa_calls import kernel_for, load
from attn_cuda._fa_capability import NAME, NAME_DIFFKV, capability_diffkv, capability_on
from attn_cuda._fa_edges import Descales, Sinks, without_positive_infinity
from attn_cuda._fa_metadata import CACHE_FREE, FlashAttnMetadata, FlashAttnMetadataBuilder
from attn_cuda._fa_providers import LIBRARIES, provider_paths
from attn_cuda._fa_step import Extras, KeyStep
from attn_shared.alignment import ALIGNMENT_BYTES, aligned, is_aligned
from attn_shared.backend import AttentionBackend, AttentionImpl, AttentionLayer
from attn_shared.cache_views import Views
from attn_shared.call_checks import CallChecker
from attn_shared.capability import Capability
from attn_shared.device import DeviceFacts
from attn_shared.errors import (
    InvalidInputError,
    UnsupportedOptionError,
    VendorMissingError,
    own_words,
)
from attn_shared.kernel_paths import KernelPath
from attn_shared.kv_cache import AttentionSpec
from attn_shared.served import require_served
from attn_shared.signed_scale import Scale
from attn_shared.spec import LayerSpec
from attn_triton.portable import portable_for

if TYPE_CHECKING:
    from attn_shared.inventory import Inventory
    from attn_shared.request import AttentionRequest

__all__ = [
    "FlashAttnBackend",
    "FlashAttnDiffKVBackend",
    "FlashAttnImpl",
    "FlashAttnMetadata",
    "FlashAttnMetadataBuilder",
]


class FlashAttnBackend(AttentionBackend):
    """FlashAttention over the paged cache as it lies, or over keys that come with the call."""

    name = NAME
    attn_api = ">=1,<2"
    vendor_libraries = LIBRARIES
    description = "FlashAttention 2, 3 and 4: the build that serves a layer on its device"

    @classmethod
    def capability(cls, device: DeviceFacts, inventory: Inventory) -> Capability:
        """Return what FlashAttention can do on the device with the builds that are installed."""
        return capability_on(device, inventory)

    @classmethod
    def kernel_paths(
        cls, request: AttentionRequest, device: DeviceFacts, inventory: Inventory
    ) -> tuple[KernelPath, ...]:
        """Return the build of FlashAttention that serves a request, and why that one."""
        return provider_paths(device, inventory, request)

    @staticmethod
    def get_impl_cls() -> type[FlashAttnImpl]:
        """Return the class that runs one layer."""
        return FlashAttnImpl

    @staticmethod
    def get_builder_cls() -> type[FlashAttnMetadataBuilder]:
        """Return the class that prepares each step."""
        return FlashAttnMetadataBuilder

    @classmethod
    def load_vendor(cls, device: DeviceFacts, inventory: Inventory) -> None:
        """Import the builds that may be meant, and note for which device.

        Raises:
            VendorMissingError: one of them does not load, in its own words.
        """
        _fa_loaded.remember(device, inventory)
        for loaded in _fa_loaded.loaded():
            for library in loaded.usable if loaded.inventory is inventory else ():
                _import(library)


def _import(library: str) -> None:
    try:
        load(library)
    except ImportError as error:
        raise VendorMissingError(
            f"{library} does not load: {own_words(error)}.", library=library
        ) from error


class FlashAttnDiffKVBackend(FlashAttnBackend):
    """The same, by the name that the field has for value heads of another width."""

    name = NAME_DIFFKV
    description = "FLASH_ATTN for value heads of another width than key heads"

    @classmethod
    def capability(cls, device: DeviceFacts, inventory: Inventory) -> Capability:
        """Return FLASH_ATTN's capability, narrowed to widths that differ."""
        return capability_diffkv(device, inventory)


class FlashAttnImpl(AttentionImpl[FlashAttnMetadata]):
    """Runs one layer on the build that was resolved when it was made."""

    can_return_lse = True

    def __init__(self, spec: LayerSpec) -> None:
        """Resolve the build, and bind its call.

        Raises:
            InvalidRequestError: a value that no backend may accept.
            UnsupportedOptionError: no build serves the layer.
            VendorMissingError: the process has loaded none.
        """
        super().__init__(spec)
        self.provider, loaded = _fa_loaded.provider_of(spec)
        require_served(NAME, loaded.capability, spec)
        _require_addressable(spec)
        self._is_cache_free = spec.attn_type in CACHE_FREE
        self._checker = CallChecker(spec)
        self._scale = Scale(spec.scale)
        self._call = kernel_for(self.provider, replace(spec, scale=self._scale.value))
        self._portable = portable_for(loaded.device)
        self.write_kv = self._portable.write_kv
        self._sinks = Sinks(self.provider)
        cache = spec.kv_cache_spec
        self._is_fp8 = isinstance(cache, AttentionSpec) and cache.is_quantized
        self._descales = Descales(spec.num_kv_heads, spec.queries_per_kv)
        self._views = Views()

    def __repr__(self) -> str:
        """Read as what runs, and who writes the cache."""
        return f"FlashAttnImpl({self.provider}, cache written by {self._portable.name})"

    def forward(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor | None,
        metadata: FlashAttnMetadata,
        output: Tensor | None = None,
        *,
        lse: Tensor | None = None,
    ) -> Tensor:
        """Attend, and return the output; see `AttentionImpl.forward`.

        Raises:
            InvalidInputError: an argument does not fit the layer or the metadata.
            UnsupportedOptionError: the layer object carries an option that it was not built with.
        """
        self.check_metadata(metadata)
        device = metadata.step.query_start_loc.device
        self._checker.check_tensors(query, output, lse, metadata.num_actual_tokens, device)
        self._checker.check_layer(layer, device)
        if lse is not None and self.spec.softcap is not None:
            raise UnsupportedOptionError(
                f"lse is given with softcap={self.spec.softcap}; allowed: None, for the kernels "
                "approximate tanh.",
                hint="select with needs_lse=True.",
            )
        keys = self._keys(key, value, kv_cache, metadata, device)
        if not metadata.num_actual_tokens:
            return self._empty_like(query) if output is None else output
        if metadata.prefix is not None:
            return self._cascade(layer, query, keys, metadata, output, lse)
        rows = self._rows(query, metadata.num_actual_tokens)
        out = None
        if output is not None and self.provider.writes_out:
            out = output if rows is query else output[: rows.shape[0]]  # as long as the query
        result, found = self._attend(layer, rows, keys, metadata.step, out, lse is not None)
        if lse is not None and found is not None:
            if self.provider.version == 2:
                found = without_positive_infinity(found)
            lse[:, : rows.shape[0]].copy_(found)
        return output if result is output else self._delivered(result, query, output)

    def check_metadata(self, metadata: FlashAttnMetadata) -> None:
        """Refuse another backend's metadata, and a step that was made for another build."""
        hint = "build it with a FLASH_ATTN builder that was given this layer."
        if not isinstance(metadata, FlashAttnMetadata):
            raise InvalidInputError.for_argument(
                "metadata", f"a {type(metadata).__name__}", "a FlashAttnMetadata", hint=hint
            )
        if metadata.provider is not self.provider and metadata.provider != self.provider:
            raise InvalidInputError.for_argument(
                "metadata", f"made for {metadata.provider}", str(self.provider), hint=hint
            )

    def _keys(
        self,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor | None,
        metadata: FlashAttnMetadata,
        device: torch.device,
    ) -> tuple[Tensor, Tensor]:
        """Return keys and values as the kernel reads them, after checking where they come from."""
        if self._is_cache_free:
            key, value = self._checker.check_keys(key, value, kv_cache, device, metadata.num_keys)
            return aligned(key[: metadata.num_keys]), aligned(value[: metadata.num_keys])
        self._checker.check_written_keys(key, value, device)
        if kv_cache is not None and kv_cache is self._views.cache():
            return self._views.parts
        cache, spec = self._checker.check_cache(kv_cache, device)
        views = spec.split(cache)
        self._views.keep(cache, (views.key, views.value))
        return views.key, views.value

    def _rows(self, query: Tensor, num_tokens: int) -> Tensor:
        """Return the query as the kernel reads it.

        FlashAttention 2 takes the number of rows for the number of requests in a step of single
        queries, so that it gets no padding.
        """
        if self.provider.version == 2 and query.shape[0] != num_tokens:
            query = query[:num_tokens]
        return self._scale.query(query)

    def _attend(
        self,
        layer: AttentionLayer,
        query: Tensor,
        keys: tuple[Tensor, Tensor],
        step: KeyStep,
        out: Tensor | None,
        with_lse: bool,
        *,
        with_sinks: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        """Call the kernel, and put right what it knows of sinks."""
        raw = layer.sinks if with_sinks else None
        sinks, is_exact = self._sinks.of(raw)
        extras = Extras(with_lse=with_lse or not is_exact, sinks=sinks, slopes=layer.alibi_slopes)
        if out is not None and is_aligned(out):
            extras.out = out
        if self._is_fp8:
            scales = (layer.q_scale, layer.k_scale, layer.v_scale)
            num_reqs, device = step.num_reqs, query.device
            query = self._descales.quantized(query, layer.q_scale)
            first, second, third = (self._descales.of(scale, num_reqs, device) for scale in scales)
            extras.descales = (first, second, third)
        result, lse = self._call(query, *keys, step, extras)
        if step.keyless is not None:
            step.keyless.blank(result, lse if extras.with_lse else None)
        if raw is not None and sinks is not None and lse is not None:
            lse = self._with_sinks(result, lse, raw, sinks, is_exact)
        return result, lse

    @staticmethod
    def _with_sinks(
        result: Tensor, lse: Tensor, sinks: Tensor, given: Tensor, is_exact: bool
    ) -> Tensor:
        """Return the LSE with the sinks, also of rows without keys, where kernels write -inf."""
        if is_exact:
            return torch.where(lse.isinf(), sinks[:, None], lse)
        return Sinks.correct(result, lse, sinks, given)

    def _cascade(
        self,
        layer: AttentionLayer,
        query: Tensor,
        keys: tuple[Tensor, Tensor],
        metadata: FlashAttnMetadata,
        output: Tensor | None,
        lse: Tensor | None,
    ) -> Tensor:
        """Attend to the prefix once for all rows, to the rest by request, and merge."""
        prefix = metadata.prefix
        if prefix is None:
            raise InvalidInputError.for_argument("metadata", "without a prefix", "one with it")
        rows = self._rows(query[: metadata.num_actual_tokens], metadata.num_actual_tokens)
        first, first_lse = self._attend(layer, rows, keys, prefix, None, True, with_sinks=False)
        second, second_lse = self._attend(layer, rows, keys, metadata.step, None, True)
        if first_lse is None or second_lse is None:
            raise InvalidInputError.for_argument("LSE", None, "one of each part")
        merged, merged_lse = self._portable.merge(first, first_lse, second, second_lse)
        if lse is not None:
            lse[:, : len(rows)].copy_(merged_lse)
        return self._delivered(merged, query, output)

    def _delivered(self, result: Tensor, query: Tensor, output: Tensor | None) -> Tensor:
        """Return the caller's output, filled, or the kernel's own tensor."""
        if output is None:
            if len(result) == len(query):
                return result
            output = self._empty_like(query)
        elif result.data_ptr() == output.data_ptr():
            return output
        output[: len(result)].copy_(result)
        return output

    def _empty_like(self, query: Tensor) -> Tensor:
        return query.new_empty((len(query), self.spec.num_heads, self.spec.head_size_v))


def _require_addressable(spec: LayerSpec) -> None:
    """Refuse a cache that the kernels would read at wrong addresses, or in another flavour."""
    cache = spec.kv_cache_spec
    if not isinstance(cache, AttentionSpec):
        return
    if cache.page_size_bytes % ALIGNMENT_BYTES:
        raise UnsupportedOptionError(
            f"page_size_padded={cache.page_size_padded} is not served by {NAME}; allowed: a "
            f"multiple of {ALIGNMENT_BYTES} bytes, which its kernels load at once."
        )
    if cache.is_quantized and cache.dtype is not torch.float8_e4m3fn:
        raise UnsupportedOptionError(
            f"a cache of {cache.dtype} is not served by {NAME}; allowed: torch.float8_e4m3fn."
        )
