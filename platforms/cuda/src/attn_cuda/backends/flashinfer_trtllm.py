"""FLASHINFER_TRTLLM: TensorRT-LLM's kernels inside FlashInfer, which read the block table."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from attn_cuda import _fi_loaded
from attn_cuda._fi_choice import kernel_paths_of
from attn_cuda._fi_impl import FlashInferImpl
from attn_cuda._fi_loaded import LIBRARY
from attn_cuda._fi_trtllm import DECODE, PREFILL, TrtllmCase, kernels_of, use_trtllm
from attn_cuda._fi_trtllm_capability import NAME_TRTLLM, capability_trtllm
from attn_cuda._fi_trtllm_metadata import FlashInferTrtllmMetadataBuilder
from attn_cuda._vendor.flashinfer_jit import FlashInferCompiler
from attn_shared.backend import AttentionBackend
from attn_shared.capability import Capability
from attn_shared.device import DeviceFacts
from attn_shared.kernel_paths import KernelPath

if TYPE_CHECKING:
    from attn_shared.inventory import Inventory
    from attn_shared.request import AttentionRequest

__all__ = [
    "FlashInferTrtllmBackend",
    "FlashInferTrtllmImpl",
    "FlashInferTrtllmMetadataBuilder",
]


class FlashInferTrtllmBackend(AttentionBackend):
    """XQA for decode on Hopper, trtllm-gen for both phases on Blackwell."""

    name = NAME_TRTLLM
    attn_api = ">=1,<2"
    vendor_libraries = (LIBRARY,)
    description = "FlashInfer: TensorRT-LLM's kernels, trtllm-gen on Blackwell, XQA on Hopper"

    @classmethod
    def capability(cls, device: DeviceFacts, inventory: Inventory) -> Capability:
        """Return what these kernels can do on the device."""
        return capability_trtllm(device, inventory)

    @classmethod
    def kernel_paths(
        cls, request: AttentionRequest, device: DeviceFacts, inventory: Inventory
    ) -> tuple[KernelPath, ...]:
        """Return which phase runs on TensorRT-LLM's kernels, and what runs the other."""
        own = kernel_paths_of(request, device)
        found: list[KernelPath] = []
        for phase, rows in ((DECODE, "decodes"), (PREFILL, "prompts")):
            case = TrtllmCase(
                phase=phase,
                num_heads=request.num_heads,
                num_kv_heads=request.num_kv_heads,
                kv_cache_dtype=request.kv_cache_dtype,
                has_sinks=request.has_sinks,
                force=True,
            )
            kernels = kernels_of(device, phase) if use_trtllm(case, device) else None
            if kernels is None:
                found += [each for each in own if (each.rows == "decodes") == (phase == DECODE)]
                continue
            why = f"TensorRT-LLM's for {phase} on {device.arch}"
            found.append(KernelPath(rows=rows, kernel=kernels, why=why))
        return tuple(found)

    @staticmethod
    def get_impl_cls() -> type[FlashInferTrtllmImpl]:
        """Return the class that runs one layer."""
        return FlashInferTrtllmImpl

    @staticmethod
    def get_builder_cls() -> type[FlashInferTrtllmMetadataBuilder]:
        """Return the class that prepares each step."""
        return FlashInferTrtllmMetadataBuilder

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


class FlashInferTrtllmImpl(FlashInferImpl):
    """Runs one layer, as FLASHINFER's does; the step's parts know their kernels."""

    backend_name: ClassVar[str] = NAME_TRTLLM

    @staticmethod
    def _capability_of(loaded: _fi_loaded.Loaded) -> Capability:
        return capability_trtllm(loaded.device, loaded.inventory)
