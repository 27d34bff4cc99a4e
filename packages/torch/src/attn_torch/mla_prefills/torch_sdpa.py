"""TORCH_SDPA among the prefills over latents: any widths, on any device, by torch alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attn_shared.capability import Capability, Support
from attn_shared.device import DeviceFacts, Vendor
from attn_shared.dtypes import COMPUTE_DTYPES
from attn_shared.kernel_paths import KernelPath
from attn_shared.limits import DeviceLimit
from attn_shared.mla_metadata import RaggedPart
from attn_shared.mla_prefill import MLAPrefill, prefill_capability
from attn_shared.request import AttentionRequest
from attn_shared.spec import BuildConfig, LayerSpec
from attn_torch._batch import HostBatch
from attn_torch._cache_reader import CallReader
from attn_torch._paths import CallMaker, kernel_paths_of
from attn_torch._plan import GroupLimits, Plan, Tiler
from attn_torch._visibility import Visibility

if TYPE_CHECKING:
    from attn_shared.inventory import Inventory

__all__ = ["TorchSDPAPrefill"]

_CAPABILITY = prefill_capability(
    tuple(DeviceLimit(vendor=vendor) for vendor in Vendor),
    frozenset(COMPUTE_DTYPES.values()),
    batch_invariant=Support.YES,
    non_causal=Support.YES,
)
_PLAIN = Visibility(window=(None, None), chunk_size=None)


class TorchSDPAPrefill(MLAPrefill):
    """scaled_dot_product_attention, or matrix products in float32 where the LSE is wanted."""

    name = "TORCH_SDPA"
    attn_api = ">=1,<2"
    description = "torch scaled_dot_product_attention; any widths"

    def __init__(self, spec: LayerSpec, config: BuildConfig, device: torch.device) -> None:
        """Keep what every step needs."""
        super().__init__(spec, config, device)
        self._calls = CallMaker(
            spec=spec,
            visibility=_PLAIN,
            num_kv_heads=spec.num_heads,
            needs_exact=spec.scale <= 0,
        )
        width = 0 if spec.mla is None else spec.mla.qk_nope_head_dim + spec.mla.v_head_dim
        limits = GroupLimits.of(
            device,
            key_bytes=max(1, spec.num_heads * width * spec.dtype.itemsize),
            num_heads=spec.num_heads,
            is_invariant=config.batch_invariant or spec.batch_invariant,
        )
        self._tiler = Tiler(visibility=_PLAIN, limits=limits, device=device, block_size=None)

    @classmethod
    def capability(cls, device: DeviceFacts, inventory: Inventory) -> Capability:
        """Return what it can do: the same on every device."""
        return _CAPABILITY

    @classmethod
    def kernel_paths(
        cls, request: AttentionRequest, device: DeviceFacts, inventory: Inventory
    ) -> tuple[KernelPath, ...]:
        """Return how prefills are multiplied; those with keys of earlier steps have an LSE."""
        return kernel_paths_of(request, device, "prefills")

    def prepare(self, part: RaggedPart) -> Plan:
        """Return the calls of a part."""
        key_starts = part.key_start_loc_cpu.tolist()
        batch = HostBatch(
            query_starts=part.query_start_loc_cpu.tolist(),
            key_lens=part.key_start_loc_cpu.diff().tolist(),
            key_starts=key_starts,
            is_causal=[part.is_causal] * (len(key_starts) - 1),
            ranges=(),
        )
        return self._tiler.plan(batch, None)

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
        if output is None:
            output = query.new_empty(*query.shape[:2], value.shape[-1])
        lse = None
        if returns_lse:
            lse = query.new_empty(query.shape[1], len(query), dtype=torch.float32)
        reader = CallReader(key=key, value=value)
        self._calls.make(query, output, lse, reader.read).run(part.plan)
        return output, lse
