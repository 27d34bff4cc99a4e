"""ROCM_ATTN: the field's name for paged attention on AMD GPUs, here on attn's Triton kernels.

Elsewhere the name stands for a HIP operator for decode beside a Triton prefill. That operator reads
keys packed by 16 bytes inside a block, which no other backend reads; attn's blocks are plain, so
that one cache serves them all, and the Triton kernels do both parts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from attn_shared.backend import AttentionBackend
from attn_shared.capability import Capability
from attn_shared.device import DeviceFacts, Vendor
from attn_shared.kernel_paths import KernelPath
from attn_shared.limits import DeviceLimit
from attn_triton.kernel_paths import kernel_paths_of
from attn_triton.paged import (
    CAPABILITY,
    TritonAttentionImpl,
    TritonAttentionMetadataBuilder,
    load_triton,
)

if TYPE_CHECKING:
    from attn_shared.inventory import Inventory
    from attn_shared.request import AttentionRequest

__all__ = ["RocmAttentionBackend", "RocmAttentionImpl", "RocmAttentionMetadataBuilder"]

_NAME = "ROCM_ATTN"
_CAPABILITY = replace(CAPABILITY, devices=(DeviceLimit(vendor=Vendor.AMD),))


class RocmAttentionBackend(AttentionBackend):
    """TRITON_ATTN's kernels under the name that AMD's users know."""

    name = _NAME
    attn_api = ">=1,<2"
    vendor_libraries = ("triton",)
    description = "TRITON_ATTN's kernels by AMD's name; the packed HIP operator is not used"

    @classmethod
    def capability(cls, device: DeviceFacts, inventory: Inventory) -> Capability:
        """Return what the Triton kernels can do, on AMD GPUs alone."""
        return _CAPABILITY

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

    @staticmethod
    def get_impl_cls() -> type[RocmAttentionImpl]:
        """Return the class that runs one layer."""
        return RocmAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[RocmAttentionMetadataBuilder]:
        """Return the class that prepares each step."""
        return RocmAttentionMetadataBuilder


class RocmAttentionImpl(TritonAttentionImpl):
    """Runs one layer."""

    backend_name: ClassVar[str] = _NAME


class RocmAttentionMetadataBuilder(TritonAttentionMetadataBuilder):
    """Prepares a step."""

    backend_name: ClassVar[str] = _NAME
