"""ROCM_AITER_MLA: AITER's decode over latents on MI300 and MI350. Not run on hardware."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attn_rocm._aiter_build import DEVICES as AITER_DEVICES
from attn_rocm._aiter_mla_call import KERNEL_HEADS, AiterMLACall
from attn_rocm._aiter_mla_capability import LATENTS, MOST_ROWS, latents_capability
from attn_rocm._aiter_mla_steps import TokenStep, TokenStepMaker
from attn_rocm._aiter_scales import Scales
from attn_rocm._vendor import aiter_mla
from attn_shared.backend import AttentionBackend, AttentionCGSupport, AttentionLayer
from attn_shared.capability import Capability, SizeSet, Support
from attn_shared.device import DeviceFacts
from attn_shared.kernel_paths import KernelPath
from attn_shared.kv_cache import KVCacheSpec
from attn_shared.loaded_devices import LoadedDevices, import_vendor
from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.mla_builder import MLAMetadataBuilder
from attn_shared.mla_heads import kernel_heads
from attn_shared.mla_impl import VendorMLAImpl
from attn_shared.mla_metadata import MLAQuerySupport
from attn_shared.mla_paths import decode_path, heads_because
from attn_shared.request import AttentionRequest
from attn_shared.spec import BuildConfig, LayerSpec
from attn_triton.portable import take_latent_kernels

if TYPE_CHECKING:
    from attn_shared.inventory import Inventory

__all__ = ["AiterMLABackend", "AiterMLAImpl", "AiterMLAMetadataBuilder"]

DEVICES = LoadedDevices(LATENTS, latents_capability)


class AiterMLABackend(AttentionBackend):
    """Up to four query tokens of a request over the latent cache as it lies."""

    name = LATENTS
    attn_api = ">=1,<2"
    vendor_libraries = ("aiter",)
    description = "AITER's decode on MI300 and MI350, tokens of any block size; not run on hardware"

    @classmethod
    def capability(cls, device: DeviceFacts, inventory: Inventory) -> Capability:
        """Return what it can do with the release that is installed."""
        return latents_capability(device, inventory)

    @classmethod
    def kernel_paths(
        cls, request: AttentionRequest, device: DeviceFacts, inventory: Inventory
    ) -> tuple[KernelPath, ...]:
        """Return the kernel of so many heads."""
        heads = kernel_heads(request.num_heads, KERNEL_HEADS)
        why = heads_because(request, KERNEL_HEADS)
        kernel = f"mla_decode_fwd for {heads} heads"
        return (decode_path(AiterMLAMetadataBuilder, kernel, why),)

    @staticmethod
    def get_impl_cls() -> type[AiterMLAImpl]:
        """Return the class that runs one layer."""
        return AiterMLAImpl

    @staticmethod
    def get_builder_cls() -> type[AiterMLAMetadataBuilder]:
        """Return the class that prepares each step."""
        return AiterMLAMetadataBuilder

    @classmethod
    def load_vendor(cls, device: DeviceFacts, inventory: Inventory) -> None:
        """Import AITER, and note for which device.

        Raises:
            VendorMissingError: it does not load, in its own words.
        """
        import_vendor("aiter", aiter_mla.decode)
        DEVICES.remember(device, inventory)


class AiterMLAMetadataBuilder(MLAMetadataBuilder[TokenStep]):
    """Describes decodes of one length to AITER, which is told the slot of every key.

    For captured sizes the slots lie in one buffer, as long as the longest sequences of the largest
    such size.
    """

    backend_name = LATENTS
    served = Capability(
        devices=AITER_DEVICES,
        dtypes=frozenset({torch.float16, torch.bfloat16}),
        head_sizes=SizeSet(),
        block_sizes=(1,),
        is_mla=True,
    )
    query_support = MLAQuerySupport.UNIFORM
    max_query_len = MOST_ROWS

    def __init__(
        self,
        kv_cache_spec: KVCacheSpec | None,
        layers: Mapping[str, LayerSpec],
        config: BuildConfig,
        device: torch.device,
    ) -> None:
        """Keep what every step needs; see `MLAMetadataBuilder`."""
        super().__init__(kv_cache_spec, layers, config, device)
        self._steps = TokenStepMaker(config, device, self.block_size)

    def check_served(self, layer: LayerSpec) -> None:
        """Refuse a layer that is not served where the library is loaded."""
        DEVICES.serving(layer)

    @classmethod
    def get_cudagraph_support(
        cls, config: BuildConfig, kv_cache_spec: KVCacheSpec | None
    ) -> AttentionCGSupport:
        """Return UNIFORM_BATCH: lengths and slots are read on the device."""
        return AttentionCGSupport.UNIFORM_BATCH

    def build_decode(self, common: CommonAttentionMetadata) -> TokenStep:
        """Return the decodes' metadata."""
        return self._steps.make(common)


class AiterMLAImpl(VendorMLAImpl[TokenStep]):
    """Runs one layer; head counts that the kernels lack are padded by repetition."""

    decode_type = TokenStep

    def __init__(self, spec: LayerSpec) -> None:
        """Bind the library's call; see `VendorMLAImpl`."""
        there = DEVICES.serving(spec).capability
        has_lse = there.lse is not Support.NO
        super().__init__(spec, DEVICES, LATENTS, can_return_lse=has_lse)
        take_latent_kernels(self, self.loaded.device)
        self._call = AiterMLACall(spec, self.dims.kv_lora_rank)
        self._scales = Scales()

    def decode(
        self,
        layer: AttentionLayer,
        query: Tensor,
        kv_cache: Tensor,
        step: TokenStep,
        out: Tensor | None,
        *,
        with_lse: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Return output and LSE of the decodes."""
        scales = None
        if self.is_quantized:
            first, second = (
                self._scales.of(scale, query.device) for scale in (layer.q_scale, layer.k_scale)
            )
            scales = (first, second)
        result, lse = self._call(query, kv_cache, step, scales=scales, with_lse=with_lse)
        if step.keyless is not None:
            step.keyless.blank(result, lse)
        return result, lse
