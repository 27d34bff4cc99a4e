"""FLASHMLA: FlashMLA's dense decode over latents on Hopper, in pages of 64 tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attn_cuda._fa_edges import Descales
from attn_cuda._flashmla_call import (
    PAGE_SIZE,
    FlashMLACall,
    FlashMLASchedules,
    kernels_of,
    schedules,
)
from attn_cuda._mla_capability import BATCHES, flashmla
from attn_cuda._mla_step import LatentStep
from attn_cuda._mla_steps import StepMaker
from attn_cuda._vendor import flash_mla
from attn_shared.backend import AttentionBackend, AttentionCGSupport, AttentionLayer
from attn_shared.capability import Capability
from attn_shared.device import DeviceFacts
from attn_shared.kernel_paths import KernelPath
from attn_shared.kv_cache import KVCacheSpec
from attn_shared.loaded_devices import LoadedDevices, import_vendor
from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.mla_builder import MLAMetadataBuilder
from attn_shared.mla_impl import VendorMLAImpl
from attn_shared.mla_metadata import MLAQuerySupport
from attn_shared.mla_paths import decode_path
from attn_shared.request import AttentionRequest
from attn_shared.spec import BuildConfig, LayerSpec
from attn_shared.step_buffers import is_captured
from attn_triton.portable import take_latent_kernels

if TYPE_CHECKING:
    from attn_shared.inventory import Inventory

__all__ = ["FlashMLABackend", "FlashMLADecode", "FlashMLAImpl", "FlashMLAMetadataBuilder"]

NAME = "FLASHMLA"
DEVICES = LoadedDevices(NAME, flashmla)


class FlashMLABackend(AttentionBackend):
    """FlashMLA over the latent cache as it lies."""

    name = NAME
    attn_api = ">=1,<2"
    vendor_libraries = ("flash_mla",)
    description = "FlashMLA's dense decode on Hopper, pages of 64 tokens"

    @classmethod
    def capability(cls, device: DeviceFacts, inventory: Inventory) -> Capability:
        """Return what FlashMLA can do on the device with the build that is installed."""
        return flashmla(device, inventory)

    @classmethod
    def kernel_paths(
        cls, request: AttentionRequest, device: DeviceFacts, inventory: Inventory
    ) -> tuple[KernelPath, ...]:
        """Return the set of kernels that decodes."""
        kernel, why = kernels_of(inventory)
        if request.kv_cache_dtype != "auto":
            why = f"{why}; queries and cache are multiplied as fp8"
        return (decode_path(FlashMLAMetadataBuilder, kernel, why),)

    @staticmethod
    def get_impl_cls() -> type[FlashMLAImpl]:
        """Return the class that runs one layer."""
        return FlashMLAImpl

    @staticmethod
    def get_builder_cls() -> type[FlashMLAMetadataBuilder]:
        """Return the class that prepares each step."""
        return FlashMLAMetadataBuilder

    @classmethod
    def load_vendor(cls, device: DeviceFacts, inventory: Inventory) -> None:
        """Import the library, and note for which device.

        Raises:
            VendorMissingError: it does not load, in its own words.
        """
        import_vendor("flash_mla", flash_mla.interface)
        DEVICES.remember(device, inventory)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlashMLADecode:
    """The decodes of a step, and the schedules that its layers share."""

    step: LatentStep
    schedules: FlashMLASchedules


class FlashMLAMetadataBuilder(MLAMetadataBuilder[FlashMLADecode]):
    """Describes decodes of one length to FlashMLA, whose kernel schedules them on the device.

    The library makes a step's schedule in the first layer's call. For a captured size the schedules
    belong to the builder, so that a step after another finds none that is old.
    """

    backend_name = NAME
    served = BATCHES
    query_support = MLAQuerySupport.UNIFORM
    decode_threshold = 128

    def __init__(
        self,
        kv_cache_spec: KVCacheSpec | None,
        layers: Mapping[str, LayerSpec],
        config: BuildConfig,
        device: torch.device,
    ) -> None:
        """Keep what every step needs; see `MLAMetadataBuilder`."""
        super().__init__(kv_cache_spec, layers, config, device)
        self._steps = StepMaker(
            config, device, block_size=self.block_size, page_size=PAGE_SIZE, loads_keyless=True
        )
        self._kept: dict[tuple[int, int], FlashMLASchedules] = {}

    def check_served(self, layer: LayerSpec) -> None:
        """Refuse a layer that is not served where the library is loaded."""
        DEVICES.serving(layer)

    @classmethod
    def get_cudagraph_support(
        cls, config: BuildConfig, kv_cache_spec: KVCacheSpec | None
    ) -> AttentionCGSupport:
        """Return UNIFORM_BATCH: the schedule is made by a kernel of the captured step."""
        return AttentionCGSupport.UNIFORM_BATCH

    def build_decode(self, common: CommonAttentionMetadata) -> FlashMLADecode:
        """Return the decodes' metadata."""
        return FlashMLADecode(step=self._steps.make(common), schedules=self._schedules(common))

    def _schedules(self, common: CommonAttentionMetadata) -> FlashMLASchedules:
        if not is_captured(common, self.config):
            return schedules()
        key = (common.num_reqs, common.num_actual_tokens)
        kept = self._kept.get(key)
        if kept is None:
            kept = self._kept[key] = schedules()
        kept.renew()
        return kept


class FlashMLAImpl(VendorMLAImpl[FlashMLADecode]):
    """Runs one layer; the kernel returns a tensor of its own."""

    decode_type = FlashMLADecode

    def __init__(self, spec: LayerSpec) -> None:
        """Bind the library's call; see `VendorMLAImpl`."""
        super().__init__(spec, DEVICES, NAME)
        take_latent_kernels(self, self.loaded.device)
        self._call = FlashMLACall(spec, self.dims.kv_lora_rank)
        self._descales = Descales(1, spec.num_heads)

    def decode(
        self,
        layer: AttentionLayer,
        query: Tensor,
        kv_cache: Tensor,
        step: FlashMLADecode,
        out: Tensor | None,
        *,
        with_lse: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Return output and LSE of the decodes."""
        scales = None
        if self.is_quantized:
            first, second = (
                self._descales.of(scale, 1, query.device).reshape(1)
                for scale in (layer.q_scale, layer.k_scale)
            )
            scales = (first, second)
        return self._call(
            query, kv_cache, step.step, step.schedules, scales=scales, with_lse=with_lse
        )
