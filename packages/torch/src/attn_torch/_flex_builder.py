"""FLEX_ATTENTION's builder: a batch becomes one compiled call, or several uncompiled ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from attn_shared.backend import AttentionMetadataBuilder
from attn_shared.errors import InvalidRequestError, UnsupportedOptionError
from attn_shared.kv_cache import KVCacheSpec
from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.served import require_batch_served, require_served
from attn_shared.spec import BuildConfig, LayerSpec, require_uniform
from attn_torch._batch import CACHE_FREE, HostBatch
from attn_torch._flex_limits import NAME, capability_of
from attn_torch._flex_paged import PagedPlan, plan_paged
from attn_torch._flex_table import PagedTable
from attn_torch._flex_uncompiled import DensePlan, plan_dense
from attn_torch._spans import Span, spans_of
from attn_torch._visibility import Visibility

__all__ = ["FlexMetadata", "FlexMetadataBuilder", "FlexOptions"]


# What one plan depends on: shapes of heads, where keys lie, and who sees whom.
_SHARED_FIELDS = (
    "num_heads",
    "num_kv_heads",
    "head_size",
    "head_size_v",
    "dtype",
    "kv_cache_spec",
    "window",
    "chunk_size",
    "attn_type",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlexOptions:
    """How the builder plans.

    Attributes:
        compile: whether calls go through torch.compile; "auto": on GPUs only.

    Raises:
        InvalidRequestError: `compile` is none of the three.
    """

    compile: bool | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        """Refuse other values."""
        if self.compile not in (True, False, "auto"):
            raise InvalidRequestError.for_field("compile", self.compile, 'True, False or "auto"')

    def compiles_on(self, device: torch.device) -> bool:
        """Whether calls on this device are compiled."""
        return device.type != "cpu" if self.compile == "auto" else bool(self.compile)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlexMetadata:
    """One step: the batch, and the calls that it became.

    Attributes:
        batch: lengths and rules on the host.
        spans: rows of requests that see at least one key.
        table: of the cache; None where the keys come with the call.
        empty_rows: (N,) int64: rows that see no key.
        compiled: the one compiled call; None where none is made.
        planner: what plans uncompiled calls, where a layer turns out to need them.
    """

    batch: HostBatch
    spans: Sequence[Span]
    table: PagedTable | None
    empty_rows: Tensor
    compiled: PagedPlan | None
    planner: FlexMetadataBuilder
    _dense: list[tuple[DensePlan, ...]] = field(default_factory=list)

    def dense(self) -> tuple[DensePlan, ...]:
        """Return the uncompiled calls, planned on first use."""
        if not self._dense:
            self._dense.append(self.planner.plan_dense(self.spans, self.table))
        return self._dense[0]


class FlexMetadataBuilder(AttentionMetadataBuilder[FlexMetadata]):
    """Lays a batch out in tiles and pages.

    `build` reads the block table on the host, so that on a GPU it waits for the device once.
    """

    def __init__(
        self,
        kv_cache_spec: KVCacheSpec | None,
        layers: Mapping[str, LayerSpec],
        config: BuildConfig,
        device: torch.device,
        *,
        options: FlexOptions | None = None,
    ) -> None:
        """Refuse layers that cannot share one plan, and those that the capability refuses.

        Args:
            kv_cache_spec: the group's cache; None for cache-free attention.
            layers: layer name -> its description.
            config: bounds of the batches.
            device: where the kernels run.
            options: whether to compile; None: the defaults.
        """
        super().__init__(kv_cache_spec, layers, config, device)
        self.options = options or FlexOptions()
        self._layer = require_uniform(layers, _SHARED_FIELDS)
        self._capability = capability_of(device)
        for spec in layers.values():
            require_served(NAME, self._capability, spec)
        if config.batch_invariant:
            raise UnsupportedOptionError(
                "FLEX_ATTENTION has no batch-invariant mode.",
                hint="let the selector choose with batch_invariant=True.",
            )
        cache = self._layer.kv_cache_spec
        self.visibility = Visibility(window=self._layer.window, chunk_size=self._layer.chunk_size)
        has_cache = self._layer.attn_type not in CACHE_FREE
        self._block_size = cache.block_size if cache is not None and has_cache else None

    def build(
        self, common_prefix_len: int, common: CommonAttentionMetadata, fast_build: bool = False
    ) -> FlexMetadata:
        """Return the step's calls; a shared prefix is checked and gains nothing.

        Raises:
            MetadataError: lengths are inexact or contradict each other or the table.
            UnsupportedOptionError: the batch asks for what the capability does not name.
        """
        layer, visibility = self._layer, self.visibility
        require_batch_served(NAME, self._capability, layer, common, common_prefix_len)
        batch = HostBatch.of(common, layer.attn_type, self._block_size)
        spans, blind = spans_of(
            batch.query_starts,
            batch.key_lens,
            is_causal=batch.is_causal,
            visibility=visibility,
            ranges=batch.ranges,
            key_starts=batch.key_starts,
        )
        table = self._read_table(common, spans)
        compiled = None
        if spans and self.options.compiles_on(self.device):
            compiled = plan_paged(spans, table, visibility, layer, self.device)
        metadata = FlexMetadata(
            batch=batch,
            spans=spans,
            table=table,
            empty_rows=_rows_of(blind).to(self.device),
            compiled=compiled,
            planner=self,
        )
        if compiled is None:
            metadata.dense()
        return metadata

    def _read_table(
        self, common: CommonAttentionMetadata, spans: Sequence[Span]
    ) -> PagedTable | None:
        if common.block_table is None or self._block_size is None:
            return None
        return PagedTable.read(common.block_table, spans, self.visibility, self._block_size)

    def plan_dense(self, spans: Sequence[Span], table: PagedTable | None) -> tuple[DensePlan, ...]:
        """Return the uncompiled calls of a batch."""
        return plan_dense(spans, table, self.visibility, self._layer.num_heads, self.device)


def _rows_of(slices: Sequence[slice]) -> Tensor:
    ranges = [torch.arange(piece.start, piece.stop) for piece in slices]
    return torch.cat(ranges) if ranges else torch.empty(0, dtype=torch.int64)
