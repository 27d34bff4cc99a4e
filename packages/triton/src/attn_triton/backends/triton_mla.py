"""TRITON_MLA: latent attention in portable Triton, for NVIDIA, AMD and Intel GPUs.

Requests have their latents cut into parts that fill the device once; all heads of a request share
each tile of them. Prefills are the shared ones, by whatever attends best there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attn_shared.backend import AttentionBackend, AttentionLayer, MLAAttentionImpl
from attn_shared.call_checks import CallChecker
from attn_shared.capability import Capability
from attn_shared.device import DeviceFacts
from attn_shared.kernel_paths import KernelPath
from attn_shared.mla_metadata import MLAMetadata
from attn_shared.request import AttentionRequest
from attn_shared.served import require_served
from attn_shared.spec import LayerSpec
from attn_triton._latent_builder import TritonMLAMetadataBuilder
from attn_triton._latent_calls import LatentCalls
from attn_triton._latent_capability import MLA_CAPABILITY, MLA_NAME
from attn_triton._latent_metadata import TritonMLADecode
from attn_triton.ahead import TritonCompiler
from attn_triton.latent_gather import gather_latents
from attn_triton.latent_paths import latent_paths_of
from attn_triton.latent_write import concat_and_cache_mla
from attn_triton.merge import merge_into
from attn_triton.paged import load_triton

if TYPE_CHECKING:
    from attn_shared.inventory import Inventory

__all__ = ["TritonMLABackend", "TritonMLADecode", "TritonMLAImpl", "TritonMLAMetadataBuilder"]


class TritonMLABackend(AttentionBackend):
    """Split-KV decode over latents in Triton."""

    name = MLA_NAME
    attn_api = ">=1,<2"
    vendor_libraries = ("triton",)
    description = "portable Triton kernels over latents: split-KV decode, every query length"

    @classmethod
    def capability(cls, device: DeviceFacts, inventory: Inventory) -> Capability:
        """Return what it can do: the same on every device, but for the rules on the device."""
        return MLA_CAPABILITY

    @classmethod
    def kernel_paths(
        cls, request: AttentionRequest, device: DeviceFacts, inventory: Inventory
    ) -> tuple[KernelPath, ...]:
        """Return which kernel decodes, by how many query rows a request has."""
        return latent_paths_of(request, device, inventory)

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
    def get_impl_cls() -> type[TritonMLAImpl]:
        """Return the class that runs one layer."""
        return TritonMLAImpl

    @staticmethod
    def get_builder_cls() -> type[TritonMLAMetadataBuilder]:
        """Return the class that prepares each step."""
        return TritonMLAMetadataBuilder


class TritonMLAImpl(MLAAttentionImpl[MLAMetadata[TritonMLADecode]]):
    """Runs one layer."""

    can_return_lse = True
    decode_type = TritonMLADecode
    write_latents = staticmethod(concat_and_cache_mla)
    gather_latents = staticmethod(gather_latents)
    merge_into = staticmethod(merge_into)

    def __init__(self, spec: LayerSpec) -> None:
        """Build from the layer's description.

        Raises:
            InvalidRequestError: a value that no backend may accept.
            UnsupportedOptionError: the capability does not serve the layer.
        """
        super().__init__(spec)
        require_served(MLA_NAME, MLA_CAPABILITY, spec)
        self._checker = CallChecker(spec)
        self._calls = LatentCalls(spec)

    def forward_mqa(
        self,
        layer: AttentionLayer,
        query: Tensor,
        kv_cache: Tensor,
        metadata: MLAMetadata[TritonMLADecode],
        output: Tensor | None = None,
        *,
        lse: Tensor | None = None,
    ) -> Tensor:
        """Decode; see `MLAAttentionImpl.forward_mqa`.

        Raises:
            InvalidInputError: an argument does not fit the layer or the metadata.
        """
        output, _ = self._checker.check_decode(layer, query, kv_cache, metadata, output, lse)
        self.check_metadata(metadata)
        step = metadata.decode
        if step is None:
            return output
        if query.stride(2) != 1:
            query = query.contiguous()
        into, sums = output, lse
        if output.stride(2) != 1:
            into = torch.empty_like(output, memory_format=torch.contiguous_format)
        if lse is not None and lse.stride(1) != 1:
            sums = torch.empty_like(lse, memory_format=torch.contiguous_format)
        self._calls.run(layer, query, into, sums, kv_cache, step)
        num_rows = metadata.num_decode_tokens
        if lse is not None and sums is not None and sums is not lse:
            lse[:, :num_rows].copy_(sums[:, :num_rows])
        if into is not output:
            output[:num_rows].copy_(into[:num_rows])
        return output
