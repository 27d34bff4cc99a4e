"""CPU_ATTN's step: a batch cut into pieces for the threads, on the host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attn_cpu._attn_batch import CACHE_FREE, HostBatch, usable_table
from attn_cpu._attn_capability import CAPABILITY, NAME
from attn_cpu._plans import Heads, Plan, Sight, partition, sight_of
from attn_shared.backend import AttentionCGSupport, AttentionMetadataBuilder
from attn_shared.checked import check_metadata
from attn_shared.errors import UnsupportedOptionError
from attn_shared.kv_cache import KVCacheSpec
from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.served import require_batch_served, require_served
from attn_shared.spec import BuildConfig, LayerSpec, require_uniform
from attn_shared.workspace import Workspace

__all__ = ["CpuAttnMetadata", "CpuAttnMetadataBuilder"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CpuAttnMetadata:
    """One step, as the layers of a group read it.

    Attributes:
        batch: lengths and rules of each request.
        plans: the partition for each sight among the layers.
        is_checked: the kernels look at table entries and slots, too.
    """

    batch: HostBatch
    plans: Mapping[Sight, Plan]
    is_checked: bool

    @property
    def num_actual_tokens(self) -> int:
        """Query rows that belong to requests."""
        return self.batch.num_tokens


class CpuAttnMetadataBuilder(AttentionMetadataBuilder[CpuAttnMetadata]):
    """Plans a batch for torch's present number of threads.

    Layers of one group may differ in window and chunks: each sight gets a plan. Requests of a batch
    may come in any order. With `batch_invariant`, of the config or of any layer, where a request is
    split depends on its own lengths alone.

    Cascade attention is not built here: a valid `common_prefix_len` is accepted and saves nothing.
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
        self._heads = Heads(*(getattr(self._layer, name) for name in Heads._fields))
        self._block_size = None if self._layer.attn_type in CACHE_FREE else self.shared_block_size()
        # One layer of each sight: what a batch is refused for depends on no more.
        self._distinct = {sight_of(layer): layer for layer in layers.values()}
        self._is_invariant = config.batch_invariant or any(
            layer.batch_invariant for layer in layers.values()
        )
        self._workspace = config.workspace or Workspace(device)

    @classmethod
    def get_cudagraph_support(
        cls, config: BuildConfig, kv_cache_spec: KVCacheSpec | None
    ) -> AttentionCGSupport:
        """Return NEVER: a CPU has no graphs."""
        return AttentionCGSupport.NEVER

    def build(
        self, common_prefix_len: int, common: CommonAttentionMetadata, fast_build: bool = False
    ) -> CpuAttnMetadata:
        """Return the step's metadata.

        Args:
            common_prefix_len: tokens of a shared prefix, checked and otherwise without effect.
            common: the batch.
            fast_build: without effect: planning takes microseconds.

        Raises:
            MetadataError: lengths are missing, contradict each other, or exceed the block table.
            UnsupportedOptionError: the batch asks for what the capability does not name.
        """
        if self.config.checked:
            check_metadata(common, spec=self.kv_cache_spec)
        for layer in self._distinct.values():
            require_batch_served(NAME, CAPABILITY, layer, common, common_prefix_len)
        batch = HostBatch.of(common, self._layer.attn_type, self._block_size)
        plans = {
            sight: partition(
                batch, self._heads, sight, self._workspace, is_invariant=self._is_invariant
            )
            for sight in self._distinct
        }
        return CpuAttnMetadata(batch=batch, plans=plans, is_checked=self.config.checked)

    def update_block_table(
        self, metadata: CpuAttnMetadata, block_table: Tensor, slot_mapping: Tensor
    ) -> CpuAttnMetadata:
        """Return metadata of the same batch over another block table.

        Args:
            metadata: of the batch.
            block_table: (B, M) int32, as wide as the batch's longest request needs.
            slot_mapping: unused: it is handed to `do_kv_cache_update` by the caller.

        Raises:
            UnsupportedOptionError: the layers have no cache.
            MetadataError: the table is too narrow.
        """
        if self._block_size is None:
            raise UnsupportedOptionError("layers without a cache have no block table.")
        table = usable_table(block_table, metadata.batch.key_lens, self._block_size)
        return replace(metadata, batch=replace(metadata.batch, block_table=table))
