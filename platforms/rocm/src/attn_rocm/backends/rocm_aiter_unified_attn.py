"""ROCM_AITER_UNIFIED_ATTN: AITER's Triton kernels, one call over pages for any causal batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attn_rocm._aiter_capability import UNIFIED, unified_capability
from attn_rocm._aiter_loaded import load, loaded, require_own_flavour
from attn_rocm._aiter_scales import Scales
from attn_rocm._aiter_unified import AiterUnifiedMetadata, AiterUnifiedMetadataBuilder
from attn_rocm._vendor import aiter
from attn_shared.backend import AttentionBackend, AttentionImpl, AttentionLayer
from attn_shared.cache_views import Views
from attn_shared.call_checks import CallChecker
from attn_shared.capability import Capability
from attn_shared.device import DeviceFacts
from attn_shared.errors import InvalidInputError
from attn_shared.kv_cache import AttentionSpec
from attn_shared.served import require_served
from attn_shared.spec import LayerSpec
from attn_triton.portable import portable_for

if TYPE_CHECKING:
    from attn_shared.inventory import Inventory

__all__ = [
    "AiterUnifiedBackend",
    "AiterUnifiedImpl",
    "AiterUnifiedMetadata",
    "AiterUnifiedMetadataBuilder",
]


class AiterUnifiedBackend(AttentionBackend):
    """Decodes and prompts in one Triton call."""

    name = UNIFIED
    attn_api = ">=1,<2"
    vendor_libraries = ("aiter",)
    description = "AITER's Triton kernels: causal batches over pages, windows, sinks, ALiBi"

    @classmethod
    def capability(cls, device: DeviceFacts, inventory: Inventory) -> Capability:
        """Return what it can do with the release that is installed."""
        return unified_capability(device, inventory)

    @classmethod
    def load_vendor(cls, device: DeviceFacts, inventory: Inventory) -> None:
        """Import AITER.

        Raises:
            VendorMissingError: it does not load, in its own words.
        """
        load(device, inventory)

    @staticmethod
    def get_impl_cls() -> type[AiterUnifiedImpl]:
        """Return the class that runs one layer."""
        return AiterUnifiedImpl

    @staticmethod
    def get_builder_cls() -> type[AiterUnifiedMetadataBuilder]:
        """Return the class that prepares each step."""
        return AiterUnifiedMetadataBuilder


class AiterUnifiedImpl(AttentionImpl[AiterUnifiedMetadata]):
    """Runs one layer."""

    def __init__(self, spec: LayerSpec) -> None:
        """Bind the call.

        Raises:
            InvalidRequestError: a value that no backend may accept.
            UnsupportedOptionError: the capability does not serve the layer, or its cache is in
                another flavour of fp8 than the device's.
            VendorMissingError: AITER is not loaded.
        """
        super().__init__(spec)
        entry = loaded(UNIFIED)
        require_served(UNIFIED, unified_capability(entry.device, entry.inventory), spec)
        require_own_flavour(UNIFIED, spec.kv_cache_spec)
        self.build = entry.build
        self._checker = CallChecker(spec, returns_lse=False)
        self._call = aiter.call("unified_attention")
        self._portable = portable_for(entry.device)
        self.write_kv = self._portable.write_kv
        cache = spec.kv_cache_spec
        self._is_fp8 = isinstance(cache, AttentionSpec) and cache.is_quantized
        self._scales = Scales()
        self._views = Views()
        left, _ = spec.window  # in causal rows nothing is to the right
        self._window = (-1 if left is None else left, 0)

    def __repr__(self) -> str:
        """Read as what runs, and who writes the cache."""
        return f"AiterUnifiedImpl({self.build}, cache written by {self._portable.name})"

    def forward(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor | None,
        metadata: AiterUnifiedMetadata,
        output: Tensor | None = None,
        *,
        lse: Tensor | None = None,
    ) -> Tensor:
        """Attend, and return the output; see `AttentionImpl.forward`.

        Raises:
            InvalidInputError: an argument does not fit the layer or the metadata.
            UnsupportedOptionError: an LSE is asked for, which the kernels do not return, or the
                layer object carries an option that it was not built with.
        """
        self.check_metadata(metadata)
        device = metadata.query_start_loc.device
        self._checker.check_tensors(query, output, lse, metadata.num_actual_tokens, device)
        self._checker.check_layer(layer, device)
        self._checker.check_written_keys(key, value, device)
        pages = self._pages(kv_cache, device)
        if output is None:
            output = query.new_empty(query.shape)
        count = metadata.num_actual_tokens
        if not count:
            return output
        # The number of rows makes the grid: padding after the requests' rows is left out.
        rows = query[:count] if query.stride(2) == 1 else query[:count].contiguous()
        into = output[:count]
        if output.stride(2) != 1:
            into = torch.empty_like(rows, memory_format=torch.contiguous_format)
        self._run(layer, rows, pages, into, metadata)
        if metadata.keyless is not None:
            metadata.keyless.blank(into, None)
        if output.stride(2) != 1:
            output[:count].copy_(into)
        return output

    def check_metadata(self, metadata: AiterUnifiedMetadata) -> None:
        """Refuse another backend's metadata, and a step that was made for another build."""
        hint = f"build it with a {UNIFIED} builder that was given this layer."
        if not isinstance(metadata, AiterUnifiedMetadata):
            raise InvalidInputError.for_argument(
                "metadata", f"a {type(metadata).__name__}", "an AiterUnifiedMetadata", hint=hint
            )
        if metadata.build != self.build:
            raise InvalidInputError.for_argument(
                "metadata", f"made for {metadata.build}", str(self.build), hint=hint
            )

    def _pages(self, kv_cache: Tensor | None, device: torch.device) -> tuple[Tensor, Tensor]:
        if kv_cache is not None and kv_cache is self._views.cache():
            return self._views.parts
        cache, spec = self._checker.check_cache(kv_cache, device)
        views = spec.split(cache)
        self._views.keep(cache, (views.key, views.value))
        return views.key, views.value

    def _run(
        self,
        layer: AttentionLayer,
        rows: Tensor,
        pages: tuple[Tensor, Tensor],
        into: Tensor,
        metadata: AiterUnifiedMetadata,
    ) -> None:
        k_scale = v_scale = None
        if self._is_fp8:
            k_scale = self._scales.of(layer.k_scale, rows.device)
            v_scale = self._scales.of(layer.v_scale, rows.device)
        self._call(
            q=rows,
            k=pages[0],
            v=pages[1],
            out=into,
            cu_seqlens_q=metadata.query_start_loc,
            max_seqlen_q=metadata.max_query_len,
            seqused_k=metadata.key_lens,
            max_seqlen_k=metadata.max_key_len,
            softmax_scale=self.spec.scale,
            causal=True,
            window_size=self._window,
            block_table=metadata.block_table,
            softcap=0.0,
            q_descale=None,
            k_descale=k_scale,
            v_descale=v_scale,
            alibi_slopes=layer.alibi_slopes,
            sinks=layer.sinks,
        )
