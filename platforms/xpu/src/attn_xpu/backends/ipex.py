"""IPEX: intel-extension-for-pytorch 2.8, its last release, for those who still run it.

Its CPU build keeps the contract on this backend by a run of the suite (docs/backends/ipex.md); the
build for GPUs has not been run on hardware.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attn_shared.backend import AttentionBackend, AttentionImpl, AttentionLayer
from attn_shared.call_checks import CallChecker
from attn_shared.capability import Capability
from attn_shared.device import DeviceFacts
from attn_shared.errors import InvalidInputError
from attn_shared.served import require_served
from attn_shared.spec import LayerSpec
from attn_xpu._ipex_calls import LayerCalls, writer
from attn_xpu._ipex_capability import LIBRARY, NAME, capability_of, capability_on
from attn_xpu._ipex_loaded import loaded_build
from attn_xpu._ipex_metadata import CACHE_FREE, IpexMetadata, IpexMetadataBuilder
from attn_xpu._keyless_rows import blank
from attn_xpu._vendor import ipex

if TYPE_CHECKING:
    from attn_shared.inventory import Inventory

__all__ = ["IpexBackend", "IpexImpl", "IpexMetadata", "IpexMetadataBuilder"]


class IpexBackend(AttentionBackend):
    """IPEX's paged and varlen attention, on Intel GPUs and, by name, on x86-64 CPUs."""

    name = NAME
    attn_api = ">=1,<2"
    vendor_libraries = (LIBRARY,)
    vendor_specs = (ipex.SPEC,)
    description = "intel-extension-for-pytorch 2.8, its last release; on GPUs not run on hardware"

    @classmethod
    def capability(cls, device: DeviceFacts, inventory: Inventory) -> Capability:
        """Return what the build for the device can do."""
        return capability_on(device, inventory)

    @staticmethod
    def get_impl_cls() -> type[IpexImpl]:
        """Return the class that runs one layer."""
        return IpexImpl

    @staticmethod
    def get_builder_cls() -> type[IpexMetadataBuilder]:
        """Return the class that prepares each step."""
        return IpexMetadataBuilder

    @classmethod
    def load_vendor(cls, device: DeviceFacts, inventory: Inventory) -> None:
        """Import the library.

        Raises:
            VendorMissingError: it does not load, in its own words.
        """
        loaded_build()


class IpexImpl(AttentionImpl[IpexMetadata]):
    """Runs one layer."""

    def __init__(self, spec: LayerSpec) -> None:
        """Bind the library's calls.

        Raises:
            InvalidRequestError: a value that no backend may accept.
            UnsupportedOptionError: the capability does not serve the layer.
            VendorMissingError: the library does not load.
        """
        super().__init__(spec)
        build = loaded_build()
        require_served(NAME, capability_of(build), spec)
        self._checker = CallChecker(spec, returns_lse=False)
        self._is_cache_free = spec.attn_type in CACHE_FREE
        self._calls = LayerCalls(spec, build)
        self.write_kv = writer(build)

    def forward(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor | None,
        metadata: IpexMetadata,
        output: Tensor | None = None,
        *,
        lse: Tensor | None = None,
    ) -> Tensor:
        """Attend, and return the output; see `AttentionImpl.forward`.

        Raises:
            InvalidInputError: an argument does not fit the layer or the metadata.
            UnsupportedOptionError: the layer object carries an option that it was not built with,
                or an LSE is asked for, which the library does not return.
        """
        self.check_metadata(metadata)
        device, count = metadata.step.query_start_loc.device, metadata.num_actual_tokens
        self._checker.check_tensors(query, output, lse, count, device)
        self._checker.check_layer(layer, device)
        keys = self._keys(key, value, kv_cache, metadata, device)
        if output is None:
            output = query.new_empty((len(query), self.spec.num_heads, self.spec.head_size_v))
        if not count:
            return output
        into = output[:count]
        if not into.is_contiguous():
            into = torch.empty_like(into, memory_format=torch.contiguous_format)
        self._calls.run(query[:count].contiguous(), *keys, into, metadata.step)
        rows = metadata.keyless.get(self.spec.window)
        if rows is not None:
            blank(rows, into, None)
        if into.data_ptr() != output.data_ptr():
            output[:count].copy_(into)
        return output

    def check_metadata(self, metadata: IpexMetadata) -> None:
        """Refuse another backend's metadata."""
        if not isinstance(metadata, IpexMetadata):
            raise InvalidInputError.for_argument(
                "metadata",
                f"a {type(metadata).__name__}",
                "an IpexMetadata",
                hint=f"build it with an {NAME} builder that was given this layer.",
            )

    def _keys(
        self,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor | None,
        metadata: IpexMetadata,
        device: torch.device,
    ) -> tuple[Tensor, Tensor]:
        """Return keys and values, after checking where they come from."""
        if self._is_cache_free:
            count = metadata.num_keys
            key, value = self._checker.check_keys(key, value, kv_cache, device, count)
            return key[:count].contiguous(), value[:count].contiguous()
        self._checker.check_written_keys(key, value, device)
        cache, spec = self._checker.check_cache(kv_cache, device)
        views = spec.split(cache)
        return views.key, views.value
