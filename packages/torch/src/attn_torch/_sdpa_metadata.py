"""TORCH_SDPA's step: a batch cut into calls, on the host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attn_shared.backend import AttentionCGSupport, AttentionMetadataBuilder
from attn_shared.checked import check_metadata
from attn_shared.errors import MetadataError, UnsupportedOptionError
from attn_shared.kv_cache import KVCacheSpec
from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.served import require_batch_served, require_served
from attn_shared.spec import BuildConfig, LayerSpec, require_uniform
from attn_shared.workspace import Workspace
from attn_torch._batch import CACHE_FREE, HostBatch
from attn_torch._plan import GroupLimits, Plan, Tiler
from attn_torch._sdpa_capability import CAPABILITY, NAME
from attn_torch._visibility import Visibility

__all__ = ["TorchSDPAMetadata", "TorchSDPAMetadataBuilder", "visibility_of"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TorchSDPAMetadata:
    """One step, as the layers of a group read it.

    Attributes:
        num_actual_tokens: query rows that belong to requests.
        num_keys: keys that a cache-free call brings; 0 with a cache.
        plans: the calls for each visibility among the layers.
        scratch: where large gathers go.
    """

    num_actual_tokens: int
    num_keys: int
    plans: Mapping[Visibility, Plan]
    scratch: Workspace


class TorchSDPAMetadataBuilder(AttentionMetadataBuilder[TorchSDPAMetadata]):
    """Cuts a batch into calls, from exact host lengths.

    Layers of one group may differ in window and chunks: each visibility gets a plan. Requests of
    a batch may come in any order. With `batch_invariant`, of the config or of any layer, every
    request is a call of its own, whose shapes depend on that request alone.

    Cascade attention computes the same result here as no cascade does: a valid
    `common_prefix_len` is accepted and saves nothing.
    """

    supports_update_block_table = True

    def __init__(
        self,
        kv_cache_spec: KVCacheSpec | None,
        layers: Mapping[str, LayerSpec],
        config: BuildConfig,
        device: torch.device,
    ) -> None:
        """Keep what every step needs.

        Raises:
            UnsupportedOptionError: layers differ in what one plan must share, or one is not served.
        """
        super().__init__(kv_cache_spec, layers, config, device)
        shared = ("attn_type", "num_heads", "num_kv_heads", "head_size", "head_size_v", "dtype")
        self._layer = require_uniform(layers, shared)
        for layer in layers.values():
            require_served(NAME, CAPABILITY, layer)
        self._block_size = None if self._layer.attn_type in CACHE_FREE else self.shared_block_size()
        limits = self._group_limits()
        # One layer of each visibility: what a batch is refused for depends on no more.
        self._distinct = {visibility_of(layer): layer for layer in layers.values()}
        self._tilers = tuple(
            Tiler(
                visibility=visibility,
                limits=limits,
                device=device,
                block_size=self._block_size,
            )
            for visibility in self._distinct
        )
        self._scratch = config.workspace or Workspace(device)

    def _group_limits(self) -> GroupLimits:
        layer = self._layer
        width = layer.head_size + layer.head_size_v
        return GroupLimits.of(
            self.device,
            key_bytes=layer.num_kv_heads * width * layer.dtype.itemsize,
            num_heads=layer.num_heads,
            is_invariant=self.config.batch_invariant
            or any(each.batch_invariant for each in self.layers.values()),
        )

    @classmethod
    def get_cudagraph_support(
        cls, config: BuildConfig, kv_cache_spec: KVCacheSpec | None
    ) -> AttentionCGSupport:
        """Return NEVER: the calls of a step depend on its lengths."""
        return AttentionCGSupport.NEVER

    def build(
        self, common_prefix_len: int, common: CommonAttentionMetadata, fast_build: bool = False
    ) -> TorchSDPAMetadata:
        """Return the step's metadata.

        Args:
            common_prefix_len: tokens of a shared prefix, checked and otherwise without effect.
            common: the batch, with exact host lengths.
            fast_build: without effect: there is one schedule.

        Raises:
            MetadataError: lengths are missing, contradict each other, or exceed the block table.
            UnsupportedOptionError: the batch asks for what the capability does not name.
        """
        if self.config.checked:
            check_metadata(common, spec=self.kv_cache_spec)
        for layer in self._distinct.values():
            require_batch_served(NAME, CAPABILITY, layer, common, common_prefix_len)
        self._check_device(common.block_table)
        batch = HostBatch.of(common, self._layer.attn_type, self._block_size)
        return TorchSDPAMetadata(
            num_actual_tokens=batch.num_tokens,
            num_keys=batch.num_keys,
            plans={
                tiler.visibility: tiler.plan(batch, common.block_table) for tiler in self._tilers
            },
            scratch=self._scratch,
        )

    def update_block_table(
        self, metadata: TorchSDPAMetadata, block_table: Tensor, slot_mapping: Tensor
    ) -> TorchSDPAMetadata:
        """Return metadata of the same batch over another block table.

        Args:
            metadata: of the batch.
            block_table: (B, M) int32, as wide as the batch's longest request needs.
            slot_mapping: unused: it is handed to `do_kv_cache_update` by the caller.

        Raises:
            UnsupportedOptionError: the layers have no cache.
        """
        if self._block_size is None:
            raise UnsupportedOptionError("layers without a cache have no block table.")
        self._check_device(block_table)
        size = self._block_size
        plans = {
            visibility: plan.with_table(block_table, size)
            for visibility, plan in metadata.plans.items()
        }
        return replace(metadata, plans=plans)

    def _check_device(self, block_table: Tensor | None) -> None:
        if block_table is not None and block_table.device.type != self.device.type:
            raise MetadataError.for_argument(
                "block_table device", block_table.device, f"{self.device}, the builder's"
            )


def visibility_of(spec: LayerSpec) -> Visibility:
    """Return what a layer's queries see."""
    return Visibility(window=spec.window, chunk_size=spec.chunk_size)
