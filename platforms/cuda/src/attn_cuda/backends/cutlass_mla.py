"""CUTLASS_MLA: CUTLASS's decode over latents on Blackwell, vLLM's operator. Not run on hardware."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attn_cuda._cutlass_mla_call import KERNEL_HEADS, PAGE_SIZE, CutlassMLACall, workspace_bytes
from attn_cuda._mla_capability import BATCHES, cutlass_mla
from attn_cuda._mla_step import LatentStep
from attn_cuda._mla_steps import StepMaker
from attn_cuda._vendor import vllm_cutlass_mla
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
from attn_shared.mla_paths import decode_path, heads_because
from attn_shared.request import AttentionRequest
from attn_shared.spec import BuildConfig, LayerSpec
from attn_shared.workspace import Workspace
from attn_triton.portable import take_latent_kernels

if TYPE_CHECKING:
    from attn_shared.inventory import Inventory

__all__ = ["CutlassMLABackend", "CutlassMLADecode", "CutlassMLAImpl", "CutlassMLAMetadataBuilder"]

NAME = "CUTLASS_MLA"
DEVICES = LoadedDevices(NAME, cutlass_mla)


class CutlassMLABackend(AttentionBackend):
    """Single query tokens over the latent cache as it lies."""

    name = NAME
    attn_api = ">=1,<2"
    vendor_libraries = ("vllm_cutlass_mla",)
    description = "CUTLASS's decode on Blackwell, pages of 128 tokens; not run on hardware"

    @classmethod
    def capability(cls, device: DeviceFacts, inventory: Inventory) -> Capability:
        """Return what the operator can do on the device."""
        return cutlass_mla(device, inventory)

    @classmethod
    def kernel_paths(
        cls, request: AttentionRequest, device: DeviceFacts, inventory: Inventory
    ) -> tuple[KernelPath, ...]:
        """Return the one operator, and what becomes of the heads."""
        why = heads_because(request, (KERNEL_HEADS,))
        kernel = "sm100_cutlass_mla_decode"
        return (decode_path(CutlassMLAMetadataBuilder, kernel, why),)

    @staticmethod
    def get_impl_cls() -> type[CutlassMLAImpl]:
        """Return the class that runs one layer."""
        return CutlassMLAImpl

    @staticmethod
    def get_builder_cls() -> type[CutlassMLAMetadataBuilder]:
        """Return the class that prepares each step."""
        return CutlassMLAMetadataBuilder

    @classmethod
    def load_vendor(cls, device: DeviceFacts, inventory: Inventory) -> None:
        """Load the operator, and note for which device.

        Raises:
            VendorMissingError: it does not load, in its own words.
        """
        import_vendor("vllm_cutlass_mla", vllm_cutlass_mla.interface)
        DEVICES.remember(device, inventory)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CutlassMLADecode:
    """The decodes of a step, and the kernel's scratch memory."""

    step: LatentStep
    workspace: Tensor


class CutlassMLAMetadataBuilder(MLAMetadataBuilder[CutlassMLADecode]):
    """Describes single decodes to the kernel, which reads lengths on the device.

    The scratch memory is that of the largest batch and the longest sequence of the configuration,
    taken once, so that captured graphs find it where it was.
    """

    backend_name = NAME
    served = BATCHES
    query_support = MLAQuerySupport.SINGLE

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
        units = DEVICES.latest().device.compute_units or 0
        size = workspace_bytes(config.max_model_len, config.max_num_seqs, units)
        self._workspace = (config.workspace or Workspace(device)).get(size)

    def check_served(self, layer: LayerSpec) -> None:
        """Refuse a layer that is not served where the library is loaded."""
        DEVICES.serving(layer)

    @classmethod
    def get_cudagraph_support(
        cls, config: BuildConfig, kv_cache_spec: KVCacheSpec | None
    ) -> AttentionCGSupport:
        """Return UNIFORM_SINGLE_TOKEN_DECODE: the kernel takes one token each."""
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def build_decode(self, common: CommonAttentionMetadata) -> CutlassMLADecode:
        """Return the decodes' metadata."""
        return CutlassMLADecode(step=self._steps.make(common), workspace=self._workspace)


class CutlassMLAImpl(VendorMLAImpl[CutlassMLADecode]):
    """Runs one layer; fewer heads than the kernel's 128 are padded by repetition."""

    decode_type = CutlassMLADecode

    def __init__(self, spec: LayerSpec) -> None:
        """Bind the operator; see `VendorMLAImpl`."""
        super().__init__(spec, DEVICES, NAME)
        take_latent_kernels(self, self.loaded.device)
        self._call = CutlassMLACall(spec, self.dims.kv_lora_rank)

    def decode(
        self,
        layer: AttentionLayer,
        query: Tensor,
        kv_cache: Tensor,
        step: CutlassMLADecode,
        out: Tensor | None,
        *,
        with_lse: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Return output and LSE of the decodes."""
        return self._call(query, kv_cache, step.step, step.workspace, with_lse=with_lse)
