"""TRTLLM_RAGGED: trtllm-gen's prefill over latents, by FlashInfer. Not run on hardware."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attn_cuda._vendor import flashinfer_mla as vendor
from attn_cuda.mla_prefills._blackwell import DEEPSEEK, blackwell_prefill, natural
from attn_shared.capability import Capability
from attn_shared.device import DeviceFacts
from attn_shared.kernel_paths import KernelPath
from attn_shared.loaded_devices import import_vendor
from attn_shared.mla_prefill import MLAPrefill
from attn_shared.request import AttentionRequest
from attn_shared.signed_scale import Scale

if TYPE_CHECKING:
    from attn_shared.inventory import Inventory
    from attn_shared.mla_metadata import RaggedPart
    from attn_shared.spec import BuildConfig, LayerSpec

__all__ = ["TrtllmRaggedPrefill"]

_GLM = (192, 64, 256)
_WORKSPACE_BYTES = 128 * 1024 * 1024  # what the library recommends


class TrtllmRaggedPrefill(MLAPrefill):
    """trtllm_ragged_attention_deepseek on Blackwell; lengths are read on the device."""

    name = "TRTLLM_RAGGED"
    attn_api = ">=1,<2"
    vendor_libraries = ("flashinfer",)
    description = "trtllm-gen's ragged kernel on Blackwell; not run on hardware"

    def __init__(self, spec: LayerSpec, config: BuildConfig, device: torch.device) -> None:
        """Bind the call; its scratch memory holds counters, which begin at zero."""
        super().__init__(spec, config, device)
        self._function = vendor.ragged()
        self._scale = Scale(spec.scale)
        with torch.inference_mode(mode=False):
            self._workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)

    @classmethod
    def capability(cls, device: DeviceFacts, inventory: Inventory) -> Capability:
        """Return what it can do on the device."""
        halves = frozenset({torch.float16, torch.bfloat16})
        return blackwell_prefill(inventory, (DEEPSEEK, _GLM), dtypes=halves)

    @classmethod
    def kernel_paths(
        cls, request: AttentionRequest, device: DeviceFacts, inventory: Inventory
    ) -> tuple[KernelPath, ...]:
        """Return the one kernel."""
        return (
            KernelPath(
                rows="prefills",
                kernel="trtllm_ragged_attention_deepseek",
                why="lengths are read on the device",
            ),
        )

    @classmethod
    def load_vendor(cls, device: DeviceFacts, inventory: Inventory) -> None:
        """Import the library.

        Raises:
            VendorMissingError: it does not load, in its own words.
        """
        import_vendor("flashinfer", vendor.ragged)

    def prepare(self, part: RaggedPart) -> Tensor:
        """Return the key lengths (B,) int32."""
        return part.key_start_loc.diff()

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
        result = self._function(
            query=self._scale.query(query),
            key=key,
            value=value.contiguous(),
            workspace_buffer=self._workspace,
            seq_lens=part.plan,
            max_q_len=max(1, part.max_query_len),
            max_kv_len=max(1, part.max_key_len),
            bmm1_scale=self._scale.value,
            bmm2_scale=1.0,
            o_sf_scale=1.0,
            batch_size=len(part.plan),
            window_left=-1,
            cum_seq_lens_q=part.query_start_loc,
            cum_seq_lens_kv=part.key_start_loc,
            enable_pdl=None,
            is_causal=part.is_causal,
            return_lse=returns_lse,
        )
        if not returns_lse:
            return result, None
        return result[0], natural(result[1])
