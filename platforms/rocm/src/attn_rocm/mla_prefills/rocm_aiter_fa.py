"""ROCM_AITER_FA among the prefills over latents: AITER's kernel over rows. Not run on hardware."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attn_rocm._aiter_build import build_in
from attn_rocm._aiter_calls import AiterCalls, Extras
from attn_rocm._aiter_capability import FLASH
from attn_rocm._aiter_mla_capability import prefills_capability
from attn_rocm._aiter_steps import PromptStep
from attn_rocm._vendor import aiter
from attn_shared.alignment import aligned, is_aligned
from attn_shared.capability import Capability
from attn_shared.device import DeviceFacts
from attn_shared.kernel_paths import KernelPath
from attn_shared.loaded_devices import LoadedDevices, import_vendor
from attn_shared.mla_prefill import MLAPrefill
from attn_shared.request import AttentionRequest, AttentionType, MLADims
from attn_shared.signed_scale import Scale

if TYPE_CHECKING:
    from attn_shared.inventory import Inventory
    from attn_shared.mla_metadata import RaggedPart
    from attn_shared.spec import BuildConfig, LayerSpec

__all__ = ["DEVICES", "AiterPrefill"]

DEVICES = LoadedDevices(f"mla_prefill {FLASH}", prefills_capability)
_LEAST_BOUND = 2  # see PromptStep


class AiterPrefill(MLAPrefill):
    """flash_attn_varlen_func over expanded heads, whose keys may be wider than the values."""

    name = FLASH
    attn_api = ">=1,<2"
    vendor_libraries = ("aiter",)
    description = "AITER's kernel over rows on MI300 and MI350; not run on hardware"

    def __init__(self, spec: LayerSpec, config: BuildConfig, device: torch.device) -> None:
        """Bind the release's calls.

        Raises:
            VendorMissingError: AITER is not loaded.
        """
        super().__init__(spec, config, device)
        there = DEVICES.latest()
        dims = spec.mla or MLADims()
        self._value_size = dims.v_head_dim
        self._scale = Scale(spec.scale)
        heads = replace(
            spec,
            num_kv_heads=spec.num_heads,
            head_size=dims.qk_nope_head_dim + dims.qk_rope_head_dim,
            head_size_v=dims.v_head_dim,
            scale=self._scale.value,
            kv_cache_spec=None,
            attn_type=AttentionType.ENCODER_ONLY,
            mla=None,
        )
        self._calls = AiterCalls(heads, build_in(there.inventory))

    @classmethod
    def capability(cls, device: DeviceFacts, inventory: Inventory) -> Capability:
        """Return what it can do with the release that is installed."""
        return prefills_capability(device, inventory)

    @classmethod
    def kernel_paths(
        cls, request: AttentionRequest, device: DeviceFacts, inventory: Inventory
    ) -> tuple[KernelPath, ...]:
        """Return the one kernel."""
        return (
            KernelPath(
                rows="prefills",
                kernel="flash_attn_varlen_func",
                why="values may be narrower than keys",
            ),
        )

    @classmethod
    def load_vendor(cls, device: DeviceFacts, inventory: Inventory) -> None:
        """Import AITER, and note for which device.

        Raises:
            VendorMissingError: it does not load, in its own words.
        """
        import_vendor("aiter", aiter.library)
        DEVICES.remember(device, inventory)

    def prepare(self, part: RaggedPart) -> PromptStep:
        """Return a part as the library reads it."""
        return PromptStep(
            query_start_loc=part.query_start_loc,
            max_query_len=max(_LEAST_BOUND, part.max_query_len),
            max_key_len=max(_LEAST_BOUND, part.max_key_len),
            causal=part.is_causal,
            num_keys=part.num_keys,
        )

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
        if output is None or not (output.is_contiguous() and is_aligned(output)):
            output = query.new_empty((*query.shape[:2], self._value_size))
        lse = self._calls.varlen(
            self._scale.query(query),
            aligned(key),
            aligned(value),
            output,
            part.plan,
            part.key_start_loc,
            Extras(with_lse=returns_lse),
        )
        return output, lse
