"""CPU_ATTN among the prefills over latents: the kernels of ordinary heads, keys from the call."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attn_cpu._attn_batch import HostBatch
from attn_cpu._calls import LIBRARY, Keys, attend, load_kernels
from attn_cpu._paths import kernel_paths_of
from attn_cpu._plans import NO_LIMITS, Heads, Plan, partition
from attn_shared.capability import Capability, Reason, Rule, Support
from attn_shared.device import DeviceFacts, Vendor
from attn_shared.dtypes import COMPUTE_DTYPES
from attn_shared.kernel_paths import KernelPath
from attn_shared.limits import DeviceLimit, SizeSet
from attn_shared.mla_metadata import RaggedPart
from attn_shared.mla_prefill import MLAPrefill, prefill_capability
from attn_shared.request import AttentionRequest
from attn_shared.spec import BuildConfig, LayerSpec
from attn_shared.workspace import Workspace

if TYPE_CHECKING:
    from attn_shared.inventory import Inventory

__all__ = ["CpuAttnPrefill"]

_WIDTHS = SizeSet(minimum=8, maximum=576, multiple_of=8)


def _widths_are_served(request: AttentionRequest, _device: DeviceFacts) -> Reason | None:
    """The kernels take heads in whole groups of eight columns."""
    dims = request.mla
    if dims is None:
        return None
    width = dims.qk_nope_head_dim + dims.qk_rope_head_dim
    if width in _WIDTHS and dims.v_head_dim in _WIDTHS:
        return None
    return Reason(
        code="mla_dims",
        value=f"query and key heads of {width}, value heads of {dims.v_head_dim}",
        allowed=f"{_WIDTHS} each",
    )


_CAPABILITY = prefill_capability(
    (DeviceLimit(vendor=Vendor.CPU),),
    frozenset(COMPUTE_DTYPES.values()),
    rules=(Rule(name="mla_dims", check=_widths_are_served),),
    batch_invariant=Support.YES,
    non_causal=Support.YES,
)


class CpuAttnPrefill(MLAPrefill):
    """One call of the library for all requests of a part, the widths of keys and values apart."""

    name = "CPU_ATTN"
    attn_api = ">=1,<2"
    description = "native C++ for AVX2, AVX-512 and AMX; any widths"
    vendor_libraries = (LIBRARY,)

    def __init__(self, spec: LayerSpec, config: BuildConfig, device: torch.device) -> None:
        """Keep what every step needs."""
        super().__init__(spec, config, device)
        self._is_invariant = config.batch_invariant or spec.batch_invariant
        self._workspace = config.workspace or Workspace(device)

    @classmethod
    def capability(cls, device: DeviceFacts, inventory: Inventory) -> Capability:
        """Return what it can do: the same on every CPU."""
        return _CAPABILITY

    @classmethod
    def kernel_paths(
        cls, request: AttentionRequest, device: DeviceFacts, inventory: Inventory
    ) -> tuple[KernelPath, ...]:
        """Return the level of instructions that prefills."""
        return kernel_paths_of(request, device, inventory)

    @classmethod
    def load_vendor(cls, device: DeviceFacts, inventory: Inventory) -> None:
        """Load the library.

        Raises:
            VendorMissingError: it does not load; in its own words.
        """
        load_kernels(cls.name, inventory)

    def prepare(self, part: RaggedPart) -> tuple[HostBatch, Plan]:
        """Return the part's lengths and its partition for the threads."""
        batch = HostBatch(
            query_start_loc=part.query_start_loc_cpu,
            key_lens=part.key_start_loc_cpu.diff(),
            key_start_loc=part.key_start_loc_cpu,
            block_table=None,
            is_causal=part.is_causal,
            causal_per_request=None,
            ranges=None,
            num_tokens=part.num_queries,
            num_keys=part.num_keys,
        )
        return batch, partition(
            batch, self._heads(), NO_LIMITS, self._workspace, is_invariant=self._is_invariant
        )

    def _heads(self) -> Heads:
        """Return the expanded heads: each has keys and values of its own."""
        dims, heads = self.spec.mla, self.spec.num_heads
        if dims is None:  # the builder of latents gives no other layers
            raise TypeError("the layer has no latents")
        width = dims.qk_nope_head_dim + dims.qk_rope_head_dim
        return Heads(heads, heads, width, dims.v_head_dim)

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
        batch, plan = part.plan
        options = (self.spec.scale, None, None, None, None)
        attend(query, output, lse, Keys(key, value), batch, plan, options)
        return output, lse
