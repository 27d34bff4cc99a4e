"""FLASHINFER among the prefills over latents: CUTLASS's ragged kernel. Not run on hardware."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attn_cuda._fi_wrappers import Planner, shared_workspace
from attn_cuda._vendor import flashinfer
from attn_cuda.mla_prefills._blackwell import DEEPSEEK, blackwell_prefill, natural
from attn_shared.capability import Capability
from attn_shared.device import DeviceFacts
from attn_shared.kernel_paths import KernelPath
from attn_shared.loaded_devices import import_vendor
from attn_shared.mla_prefill import MLAPrefill
from attn_shared.request import AttentionRequest, MLADims
from attn_shared.signed_scale import Scale

if TYPE_CHECKING:
    from attn_shared.inventory import Inventory
    from attn_shared.mla_metadata import RaggedPart
    from attn_shared.spec import BuildConfig, LayerSpec

__all__ = ["FlashInferPrefill"]

_KERNELS = "cutlass"
_WORKSPACE_BYTES = 128 * 1024 * 1024  # what the library recommends


class FlashInferPrefill(MLAPrefill):
    """BatchPrefillWithRaggedKVCacheWrapper on Blackwell, a plan for each part of a step."""

    name = "FLASHINFER"
    attn_api = ">=1,<2"
    vendor_libraries = ("flashinfer",)
    description = "FlashInfer's ragged CUTLASS kernel on Blackwell; not run on hardware"

    def __init__(self, spec: LayerSpec, config: BuildConfig, device: torch.device) -> None:
        """Keep what plans are made from."""
        super().__init__(spec, config, device)
        self._dims = spec.mla or MLADims()
        self._scale = Scale(spec.scale)
        self._workspace = (config.workspace or shared_workspace(device)).get(_WORKSPACE_BYTES)

    @classmethod
    def capability(cls, device: DeviceFacts, inventory: Inventory) -> Capability:
        """Return what it can do on the device."""
        halves = frozenset({torch.float16, torch.bfloat16})
        return blackwell_prefill(inventory, (DEEPSEEK,), dtypes=halves)

    @classmethod
    def kernel_paths(
        cls, request: AttentionRequest, device: DeviceFacts, inventory: Inventory
    ) -> tuple[KernelPath, ...]:
        """Return the one kernel."""
        return (
            KernelPath(
                rows="prefills",
                kernel=f'FlashInfer\'s ragged kernel "{_KERNELS}"',
                why="planned on the host",
            ),
        )

    @classmethod
    def load_vendor(cls, device: DeviceFacts, inventory: Inventory) -> None:
        """Import the library.

        Raises:
            VendorMissingError: it does not load, in its own words.
        """
        import_vendor("flashinfer", lambda: flashinfer.wrapper("ragged"))

    def prepare(self, part: RaggedPart) -> Any:
        """Return a planned wrapper; the library waits for the longest query of the device."""
        wrapper = flashinfer.wrapper("ragged")(self._workspace, "NHD", backend=_KERNELS)
        planner = Planner(wrapper, self.device, {})
        dims, spec = self._dims, self.spec
        planner.plan(
            qo_indptr=part.query_start_loc,
            kv_indptr=part.key_start_loc,
            num_qo_heads=spec.num_heads,
            num_kv_heads=spec.num_heads,
            head_dim_qk=dims.qk_nope_head_dim + dims.qk_rope_head_dim,
            head_dim_vo=dims.v_head_dim,
            causal=part.is_causal,
            sm_scale=self._scale.value,
            q_data_type=spec.dtype,
            kv_data_type=spec.dtype,
        )
        return planner

    def run(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        part: RaggedPart,
        *,
        output: Tensor | None = None,
        returns_lse: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend; see `MLAPrefill.run`."""
        wrapper = part.plan.wrapper
        tensors = {"q": self._scale.query(query), "k": key, "v": value.contiguous()}
        if not returns_lse:
            return wrapper.run(**tensors), None
        result, lse = wrapper.run(**tensors, return_lse=True)
        return result, natural(lse)
