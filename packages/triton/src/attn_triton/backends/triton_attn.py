"""TRITON_ATTN: paged attention in portable Triton, for NVIDIA, AMD and Intel GPUs.

Requests of few query tokens have their keys cut into parts that fill the device once; the others
run by blocks of query rows. Both kernels serve the whole contract; what a batch does not ask for
costs nothing, as it is compiled out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attn_shared.backend import AttentionBackend
from attn_shared.capability import Capability
from attn_shared.device import DeviceFacts
from attn_shared.kernel_paths import KernelPath
from attn_triton.ahead import TritonCompiler
from attn_triton.kernel_paths import kernel_paths_of
from attn_triton.paged import (
    CAPABILITY,
    NAME,
    TritonAttentionImpl,
    TritonAttentionMetadata,
    TritonAttentionMetadataBuilder,
    load_triton,
)

if TYPE_CHECKING:
    from attn_shared.inventory import Inventory
    from attn_shared.request import AttentionRequest

__all__ = [
    "TritonAttentionBackend",
    "TritonAttentionImpl",
    "TritonAttentionMetadata",
    "TritonAttentionMetadataBuilder",
]


class TritonAttentionBackend(AttentionBackend):
    """Split-KV decode and blocked prefill in Triton."""

    name = NAME
    attn_api = ">=1,<2"
    vendor_libraries = ("triton",)
    description = "portable Triton kernels: split-KV decode, blocked prefill; every feature"

    @classmethod
    def capability(cls, device: DeviceFacts, inventory: Inventory) -> Capability:
        """Return what it can do: the same on every device, but for the rules on the device."""
        return CAPABILITY

    @classmethod
    def kernel_paths(
        cls, request: AttentionRequest, device: DeviceFacts, inventory: Inventory
    ) -> tuple[KernelPath, ...]:
        """Return which kernel prompts take, and where it reads their keys."""
        return kernel_paths_of(request, device)

    @classmethod
    def load_vendor(cls, device: DeviceFacts, inventory: Inventory) -> None:
        """Import Triton and see that it can run kernels here.

        Raises:
            VendorMissingError: it does not import, or has no active driver.
        """
        load_triton()

    @classmethod
    def kernel_compiler(cls) -> TritonCompiler:
        """Return what notes kernels and compiles them side by side."""
        return TritonCompiler()

    @staticmethod
    def get_impl_cls() -> type[TritonAttentionImpl]:
        """Return the class that runs one layer."""
        return TritonAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[TritonAttentionMetadataBuilder]:
        """Return the class that prepares each step."""
        return TritonAttentionMetadataBuilder
