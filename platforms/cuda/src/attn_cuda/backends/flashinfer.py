"""FLASHINFER: planned wrappers over the paged cache as it lies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attn_cuda import _fi_loaded
from attn_cuda._fi_capability import NAME, capability_on
from attn_cuda._fi_choice import kernel_paths_of
from attn_cuda._fi_impl import FlashInferImpl
from attn_cuda._fi_loaded import LIBRARY
from attn_cuda._fi_metadata import FlashInferMetadata, FlashInferMetadataBuilder
from attn_cuda._vendor.flashinfer_jit import FlashInferCompiler
from attn_shared.backend import AttentionBackend
from attn_shared.capability import Capability
from attn_shared.device import DeviceFacts
from attn_shared.kernel_paths import KernelPath

if TYPE_CHECKING:
    from attn_shared.inventory import Inventory
    from attn_shared.request import AttentionRequest

__all__ = [
    "FlashInferBackend",
    "FlashInferImpl",
    "FlashInferMetadata",
    "FlashInferMetadataBuilder",
]


class FlashInferBackend(AttentionBackend):
    """FlashInfer's own kernels, planned on the host once per step."""

    name = NAME
    attn_api = ">=1,<2"
    vendor_libraries = (LIBRARY,)
    description = "FlashInfer: planned decode and prefill, compiled at first use"

    @classmethod
    def capability(cls, device: DeviceFacts, inventory: Inventory) -> Capability:
        """Return what FlashInfer can do on the device."""
        return capability_on(device, inventory)

    @classmethod
    def kernel_paths(
        cls, request: AttentionRequest, device: DeviceFacts, inventory: Inventory
    ) -> tuple[KernelPath, ...]:
        """Return whether decodes run on tensor cores, and prompts on "fa2" or "fa3"."""
        return kernel_paths_of(request, device)

    @staticmethod
    def get_impl_cls() -> type[FlashInferImpl]:
        """Return the class that runs one layer."""
        return FlashInferImpl

    @staticmethod
    def get_builder_cls() -> type[FlashInferMetadataBuilder]:
        """Return the class that prepares each step."""
        return FlashInferMetadataBuilder

    @classmethod
    def load_vendor(cls, device: DeviceFacts, inventory: Inventory) -> None:
        """Import the library, and note for which device.

        Raises:
            VendorMissingError: it does not load, in its own words.
        """
        _fi_loaded.load(device, inventory)

    @classmethod
    def kernel_compiler(cls) -> FlashInferCompiler:
        """Return FlashInfer's compiler.

        Raises:
            VendorMissingError: it cannot be asked, in the library's own words.
        """
        return FlashInferCompiler()
