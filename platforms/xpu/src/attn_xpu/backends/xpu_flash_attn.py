"""XPU_FLASH_ATTN: Intel's FlashAttention for Xe2 and Xe3, from vllm-xpu-kernels.

Not run on hardware. Known elsewhere as FLASH_ATTN, the name that vLLM has for it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attn_shared.backend import AttentionBackend, AttentionImpl, AttentionLayer
from attn_shared.call_checks import CallChecker
from attn_shared.capability import Capability
from attn_shared.device import DeviceFacts
from attn_shared.errors import (
    InvalidInputError,
    UnsupportedOptionError,
    VendorMissingError,
    own_words,
)
from attn_shared.inventory import Inventory
from attn_shared.kv_cache import AttentionSpec
from attn_shared.rounded_sinks import RoundedSinks
from attn_shared.served import require_served
from attn_shared.signed_scale import Scale
from attn_shared.spec import LayerSpec
from attn_xpu._keyless_rows import blank
from attn_xpu._vendor import vllm_xpu_kernels
from attn_xpu._xpu_fa_calls import Descales, Extras, KernelCall
from attn_xpu._xpu_fa_capability import (
    FP8_DTYPES,
    LIBRARY,
    NAME,
    capability_of_kernels,
    capability_on,
)
from attn_xpu._xpu_fa_metadata import (
    CACHE_FREE,
    XpuFlashAttnMetadata,
    XpuFlashAttnMetadataBuilder,
)
from attn_xpu._xpu_fa_sinks import correct_rounded, with_sinks

if TYPE_CHECKING:
    from types import ModuleType

__all__ = [
    "XpuFlashAttnBackend",
    "XpuFlashAttnImpl",
    "XpuFlashAttnMetadata",
    "XpuFlashAttnMetadataBuilder",
]


class XpuFlashAttnBackend(AttentionBackend):
    """Intel's kernels over the paged cache as it lies, or over keys that come with the call."""

    name = NAME
    attn_api = ">=1,<2"
    vendor_libraries = (LIBRARY,)
    description = "Intel's FlashAttention for Xe2 and Xe3 (vllm-xpu-kernels); not run on hardware"

    @classmethod
    def capability(cls, device: DeviceFacts, inventory: Inventory) -> Capability:
        """Return what the kernels can do on the device."""
        return capability_on(device, inventory)

    @staticmethod
    def get_impl_cls() -> type[XpuFlashAttnImpl]:
        """Return the class that runs one layer."""
        return XpuFlashAttnImpl

    @staticmethod
    def get_builder_cls() -> type[XpuFlashAttnMetadataBuilder]:
        """Return the class that prepares each step."""
        return XpuFlashAttnMetadataBuilder

    @classmethod
    def load_vendor(cls, device: DeviceFacts, inventory: Inventory) -> None:
        """Import the library and its kernels.

        Raises:
            VendorMissingError: it does not load, in its own words.
        """
        _load()


def _load() -> ModuleType:
    try:
        return vllm_xpu_kernels.interface()
    except ImportError as error:
        raise VendorMissingError(
            f"{LIBRARY} does not load: {own_words(error)}.",
            library=LIBRARY,
            hint=vllm_xpu_kernels.SPEC.install,
        ) from error


class XpuFlashAttnImpl(AttentionImpl[XpuFlashAttnMetadata]):
    """Runs one layer."""

    can_return_lse = True

    def __init__(self, spec: LayerSpec) -> None:
        """Bind the library's call.

        Raises:
            InvalidRequestError: a value that no backend may accept.
            UnsupportedOptionError: the capability does not serve the layer.
            VendorMissingError: the library does not load.
        """
        super().__init__(spec)
        require_served(NAME, capability_of_kernels(Inventory()), spec)
        _require_readable(spec)
        self._checker = CallChecker(spec)
        self._is_cache_free = spec.attn_type in CACHE_FREE
        cache = spec.kv_cache_spec
        self._is_fp8 = isinstance(cache, AttentionSpec) and cache.is_quantized
        self._scale = Scale(spec.scale)
        _load()
        self._call = KernelCall(replace(spec, scale=self._scale.value))
        self._sinks = RoundedSinks(spec.dtype)
        self._descales = Descales(spec.num_kv_heads)

    def __repr__(self) -> str:
        """Read as what runs, and how often without a kernel."""
        slow = self._call.slow_calls
        words = f", {slow} calls on its slow reference" if slow else ""
        return f"XpuFlashAttnImpl({LIBRARY}{words})"

    def forward(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor | None,
        metadata: XpuFlashAttnMetadata,
        output: Tensor | None = None,
        *,
        lse: Tensor | None = None,
    ) -> Tensor:
        """Attend, and return the output; see `AttentionImpl.forward`.

        Raises:
            InvalidInputError: an argument does not fit the layer or the metadata.
            UnsupportedOptionError: the layer object carries an option that it was not built with,
                or the library has no kernel for the layer.
        """
        self.check_metadata(metadata)
        device = metadata.step.query_start_loc.device
        num_tokens = metadata.num_actual_tokens
        self._checker.check_tensors(query, output, lse, num_tokens, device)
        self._checker.check_layer(layer, device)
        if lse is not None and self.spec.window != (None, None):
            raise UnsupportedOptionError(
                f"lse is given with window={self.spec.window}; allowed: None, for no kernel "
                "returns it.",
                hint="select with needs_lse=True.",
            )
        keys = self._keys(key, value, kv_cache, metadata, device)
        if output is None:
            output = query.new_empty((len(query), self.spec.num_heads, self.spec.head_size_v))
        if not num_tokens:
            return output
        into = output[:num_tokens]
        if not into.is_contiguous():
            into = torch.empty_like(into, memory_format=torch.contiguous_format)
        found = self._attend(layer, query[:num_tokens], keys, metadata, into, lse is not None)
        if into.data_ptr() != output.data_ptr():
            output[:num_tokens].copy_(into)
        if lse is not None and found is not None:
            lse[:, :num_tokens].copy_(found)
        return output

    def check_metadata(self, metadata: XpuFlashAttnMetadata) -> None:
        """Refuse another backend's metadata."""
        if not isinstance(metadata, XpuFlashAttnMetadata):
            raise InvalidInputError.for_argument(
                "metadata",
                f"a {type(metadata).__name__}",
                "an XpuFlashAttnMetadata",
                hint=f"build it with an {NAME} builder that was given this layer.",
            )

    def _keys(
        self,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor | None,
        metadata: XpuFlashAttnMetadata,
        device: torch.device,
    ) -> tuple[Tensor, Tensor]:
        """Return keys and values as the kernel reads them, after checking where they come from."""
        if self._is_cache_free:
            count = metadata.num_keys
            key, value = self._checker.check_keys(key, value, kv_cache, device, count)
            return key[:count].contiguous(), value[:count].contiguous()
        self._checker.check_written_keys(key, value, device)
        cache, spec = self._checker.check_cache(kv_cache, device)
        views = spec.split(cache)
        between, token = views.key.stride(0), views.key.stride(1)
        if between % token:
            raise UnsupportedOptionError(
                f"blocks that lie {between} elements apart (page_size_padded="
                f"{spec.page_size_padded}) are not served by {NAME}; allowed: a multiple of "
                f"{token}, which the keys of one token take."
            )
        return views.key, views.value

    def _attend(
        self,
        layer: AttentionLayer,
        query: Tensor,
        keys: tuple[Tensor, Tensor],
        metadata: XpuFlashAttnMetadata,
        into: Tensor,
        with_lse: bool,
    ) -> Tensor | None:
        """Call the kernel, and put right what it knows of sinks and of rows without keys.

        It takes sinks in the query's dtype, and has no kernels for them beside an LSE: where one
        is wanted they enter the denominator afterwards. Sinks that the dtype does not hold are
        rounded for the kernel, and a second call without them shows what they weigh.
        """
        query = self._scale.signed(query).contiguous()
        sinks, is_exact = self._sinks.of(layer.sinks)
        extras = Extras(with_lse=with_lse, sinks=None if with_lse else sinks)
        if self._is_fp8:
            count, device = metadata.num_reqs, query.device
            extras.descales = (
                self._descales.of("k_scale", layer.k_scale, count, device),
                self._descales.of("v_scale", layer.v_scale, count, device),
            )
        lse = self._call(query, *keys, into, metadata.step, extras)
        if extras.sinks is not None and not is_exact and layer.sinks is not None:
            rounded, extras.sinks = extras.sinks, None
            without = torch.empty_like(into)
            self._call(query, *keys, without, metadata.step, extras)
            correct_rounded(into, without, layer.sinks, rounded)
        rows = metadata.keyless.get(self.spec.window)
        if rows is not None:
            blank(rows, into, lse)
        if lse is not None and layer.sinks is not None:
            lse = with_sinks(into, lse, layer.sinks)
        return lse


def _require_readable(spec: LayerSpec) -> None:
    """Refuse an fp8 cache in a flavour that the kernels take for another."""
    cache = spec.kv_cache_spec
    if isinstance(cache, AttentionSpec) and cache.is_quantized and cache.dtype not in FP8_DTYPES:
        raise UnsupportedOptionError(
            f"a cache of {cache.dtype} is not served by {NAME}; allowed: "
            f"{' or '.join(map(str, FP8_DTYPES))}."
        )
