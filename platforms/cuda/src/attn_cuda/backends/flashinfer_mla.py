"""FLASHINFER_MLA: FlashInfer over latents, planned on Hopper, by trtllm-gen on Blackwell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attn_cuda._fi_mla_plan import PlannedMLA
from attn_cuda._fi_mla_trtllm import TABLE_TOKENS, TrtllmMLA, trtllm_page_size
from attn_cuda._fi_mla_wrappers import LentPlan, Wrappers
from attn_cuda._fi_wrappers import shared_workspace
from attn_cuda._mla_capability import BATCHES, flashinfer_mla, is_blackwell
from attn_cuda._mla_step import LatentStep
from attn_cuda._mla_steps import StepMaker
from attn_cuda._vendor import flashinfer_mla as vendor
from attn_cuda._vendor.flashinfer_jit import FlashInferCompiler
from attn_shared.backend import AttentionBackend, AttentionCGSupport, AttentionLayer
from attn_shared.capability import Capability
from attn_shared.device import DeviceFacts
from attn_shared.errors import InvalidInputError
from attn_shared.kernel_paths import KernelPath
from attn_shared.kv_cache import KVCacheSpec
from attn_shared.loaded_devices import LoadedDevices, import_vendor
from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.mla_builder import MLAMetadataBuilder
from attn_shared.mla_impl import VendorMLAImpl
from attn_shared.mla_metadata import MLAMetadata, MLAQuerySupport
from attn_shared.mla_paths import decode_path
from attn_shared.request import AttentionRequest, MLADims
from attn_shared.spec import BuildConfig, LayerSpec
from attn_shared.step_buffers import is_captured
from attn_shared.workspace import Workspace
from attn_triton.portable import portable_for, take_latent_kernels

if TYPE_CHECKING:
    from attn_shared.inventory import Inventory

__all__ = [
    "FlashInferMLABackend",
    "FlashInferMLADecode",
    "FlashInferMLAImpl",
    "FlashInferMLAMetadataBuilder",
]

NAME = "FLASHINFER_MLA"
DEVICES = LoadedDevices(NAME, flashinfer_mla)

_PLANNED = "fa3"  # kernels for Hopper; their names for older GPUs are "fa2"
_WORKSPACE_BYTES = 128 * 1024 * 1024  # what the library recommends


class FlashInferMLABackend(AttentionBackend):
    """FlashInfer over the latent cache as it lies."""

    name = NAME
    attn_api = ">=1,<2"
    vendor_libraries = ("flashinfer",)
    description = "FlashInfer: planned decodes on Hopper, trtllm-gen on Blackwell"

    @classmethod
    def capability(cls, device: DeviceFacts, inventory: Inventory) -> Capability:
        """Return what FlashInfer can do on the device."""
        return flashinfer_mla(device, inventory)

    @classmethod
    def kernel_paths(
        cls, request: AttentionRequest, device: DeviceFacts, inventory: Inventory
    ) -> tuple[KernelPath, ...]:
        """Return the kernels of the device."""
        builder = FlashInferMLAMetadataBuilder
        if not is_blackwell(device):
            why = f"planned on the host for {device.arch}"
            return (decode_path(builder, f'"{_PLANNED}"', why),)
        why = f"{device.arch} has them, and no plan is made"
        if request.kv_cache_dtype != "auto":
            why = f"{why}; queries and cache are multiplied as fp8"
        return (decode_path(builder, "trtllm-gen's kernels", why),)

    @staticmethod
    def get_impl_cls() -> type[FlashInferMLAImpl]:
        """Return the class that runs one layer."""
        return FlashInferMLAImpl

    @staticmethod
    def get_builder_cls() -> type[FlashInferMLAMetadataBuilder]:
        """Return the class that prepares each step."""
        return FlashInferMLAMetadataBuilder

    @classmethod
    def load_vendor(cls, device: DeviceFacts, inventory: Inventory) -> None:
        """Import the library, and note for which device.

        Raises:
            VendorMissingError: it does not load, in its own words.
        """
        import_vendor("flashinfer", vendor.interface)
        DEVICES.remember(device, inventory)

    @classmethod
    def kernel_compiler(cls) -> FlashInferCompiler:
        """Return FlashInfer's compiler.

        Raises:
            VendorMissingError: it cannot be asked, in the library's own words.
        """
        return FlashInferCompiler()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlashInferMLADecode:
    """The decodes of a step: planned, or with trtllm-gen's scratch memory."""

    step: LatentStep
    plan: LentPlan | None = None
    workspace: Tensor | None = None


class FlashInferMLAMetadataBuilder(MLAMetadataBuilder[FlashInferMLADecode]):
    """Plans decodes of one length on the host where the kernels are planned.

    A captured size has a wrapper of its own with buffers at fixed addresses, which `build` plans
    anew; any other step is lent one, so that the plan of an earlier step holds as long as it lives.
    """

    backend_name = NAME
    served = BATCHES
    query_support = MLAQuerySupport.UNIFORM

    def __init__(
        self,
        kv_cache_spec: KVCacheSpec | None,
        layers: Mapping[str, LayerSpec],
        config: BuildConfig,
        device: torch.device,
    ) -> None:
        """Keep what every step needs; see `MLAMetadataBuilder`."""
        super().__init__(kv_cache_spec, layers, config, device)
        self._is_planned = not is_blackwell(DEVICES.latest().device)
        page = self.block_size if self._is_planned else trtllm_page_size(self.block_size)
        self._steps = StepMaker(
            config,
            device,
            block_size=self.block_size,
            page_size=page,
            width_multiple=1 if self._is_planned else TABLE_TOKENS // page,
            loads_keyless=not self._is_planned,
        )
        # trtllm-gen keeps counters in it, which nobody else may write.
        own = None if self._is_planned else Workspace(device)
        self._space = own or config.workspace or shared_workspace(device)
        self._list_pages = portable_for(DEVICES.latest().device).page_indices
        self._wrappers = Wrappers(self._wrapper)

    def check_served(self, layer: LayerSpec) -> None:
        """Refuse a layer that is not served where the library is loaded."""
        DEVICES.serving(layer)

    @classmethod
    def get_cudagraph_support(
        cls, config: BuildConfig, kv_cache_spec: KVCacheSpec | None
    ) -> AttentionCGSupport:
        """Return UNIFORM_BATCH: decodes of one length."""
        return AttentionCGSupport.UNIFORM_BATCH

    def _wrapper(self, most_pages: int, num_reqs: int) -> PlannedMLA:
        return PlannedMLA(
            vendor.interface(),
            self.layer,
            (self.layer.mla or MLADims()).kv_lora_rank,
            page_size=self.block_size,
            workspace=self._space.get(_WORKSPACE_BYTES),
            backend=_PLANNED,
            list_pages=self._list_pages,
            most_pages=most_pages,
            num_reqs=num_reqs,
        )

    def build_decode(self, common: CommonAttentionMetadata) -> FlashInferMLADecode:
        """Return the decodes' metadata.

        Raises:
            MetadataError: the kernels are planned, and host lengths are missing or not exact.
        """
        step = self._steps.make(common)
        if not self._is_planned:
            return FlashInferMLADecode(step=step, workspace=self._space.get(_WORKSPACE_BYTES))
        plan = (
            self._wrappers.captured(
                common.num_reqs, common.num_actual_tokens, step.block_table.numel()
            )
            if is_captured(common, self.config)
            else self._wrappers.lend()
        )
        plan.planned.plan(step, common.query_start_loc_cpu, common.exact_seq_lens_cpu)
        return FlashInferMLADecode(step=step, plan=plan)


class FlashInferMLAImpl(VendorMLAImpl[FlashInferMLADecode]):
    """Runs one layer on the kernels of its device."""

    decode_type = FlashInferMLADecode

    def __init__(self, spec: LayerSpec) -> None:
        """Bind the library's call; see `VendorMLAImpl`."""
        super().__init__(spec, DEVICES, NAME)
        take_latent_kernels(self, self.loaded.device)
        self._trtllm: TrtllmMLA | None = None
        if is_blackwell(self.loaded.device):
            self._trtllm = TrtllmMLA(vendor.interface(), spec, self.dims)

    def check_metadata(self, metadata: MLAMetadata[FlashInferMLADecode]) -> None:
        """Refuse another backend's metadata, and decodes that were planned for another device."""
        super().check_metadata(metadata)
        step = metadata.decode
        if step is not None and step.plan is None and self._trtllm is None:
            raise InvalidInputError.for_argument(
                "metadata.decode", "made for trtllm-gen", "made for the device of this layer"
            )

    def decode(
        self,
        layer: AttentionLayer,
        query: Tensor,
        kv_cache: Tensor,
        step: FlashInferMLADecode,
        out: Tensor | None,
        *,
        with_lse: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Return output and LSE of the decodes."""
        if step.plan is not None:
            if out is not None and not out.is_contiguous():
                out = None
            return step.plan.planned(query, kv_cache, out, with_lse=with_lse)
        if self._trtllm is None or step.workspace is None:
            raise TypeError("decodes that were checked have a wrapper or a workspace")
        scales = (layer.q_scale, layer.k_scale) if self.is_quantized else None
        return self._trtllm(
            query, kv_cache, step.step, step.workspace, scales=scales, with_lse=with_lse
        )
