"""FLEX_ATTENTION: torch.nn.attention.flex_attention over a paged cache.

The block table becomes a block mask: each tile of query rows visits the pages that hold its
request's keys, and mask and score functions work on the absolute positions that those pages have
in the sequence. Compiled, the kernel reads the cache where it is (see `_flex_paged`). Uncompiled,
torch's own code for the operator runs over gathered keys (see `_flex_uncompiled`); it is right and
slow, and the only way to an LSE, and with it to sinks, on a CPU.

Measured with torch 2.13 on 2 cores of a Xeon (AVX-512, AMX), per layer and call, see docs: a
compilation takes 8 to 20 s per combination of padded shapes, a call costs about 10 ms uncompiled
before any arithmetic. That is why a CPU compiles on request alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from attn_shared.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionLayer,
    AttentionMetadataBuilder,
)
from attn_shared.capability import Capability
from attn_shared.cascade import check_cascade
from attn_shared.device import DeviceFacts
from attn_shared.errors import InvalidInputError, InvalidRequestError, UnsupportedOptionError
from attn_shared.inventory import Inventory
from attn_shared.kv_cache import KVCacheSpec
from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.spec import BuildConfig, LayerSpec, require_uniform
from attn_torch import _flex_call
from attn_torch._batch import CACHE_FREE, HostBatch
from attn_torch._checks import CallChecker
from attn_torch._flex_limits import check_layer, flex_capability
from attn_torch._flex_paged import PagedPlan, plan_paged
from attn_torch._flex_table import PagedTable
from attn_torch._flex_tiles import TileRows
from attn_torch._flex_uncompiled import DensePlan, plan_dense
from attn_torch._spans import Span, spans_of
from attn_torch._visibility import Visibility

__all__ = [
    "FlexAttentionBackend",
    "FlexAttentionImpl",
    "FlexMetadata",
    "FlexMetadataBuilder",
    "FlexOptions",
]

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
        for spec in layers.values():
            check_layer(spec, device)
        if config.batch_invariant:
            raise UnsupportedOptionError(
                "FLEX_ATTENTION has no batch-invariant mode.",
                hint="let the selector choose with batch_invariant=True.",
            )
        cache = self._layer.kv_cache_spec
        self._visibility = Visibility(window=self._layer.window, chunk_size=self._layer.chunk_size)
        has_cache = self._layer.attn_type not in CACHE_FREE
        self._block_size = cache.block_size if cache is not None and has_cache else None

    def build(
        self, common_prefix_len: int, common: CommonAttentionMetadata, fast_build: bool = False
    ) -> FlexMetadata:
        """Return the step's calls; a shared prefix is checked and gains nothing.

        Raises:
            MetadataError: lengths are inexact or contradict each other or the table.
            UnsupportedOptionError: the sequences are sharded over ranks.
        """
        layer, visibility = self._layer, self._visibility
        if common.dcp_local_seq_lens is not None:
            raise UnsupportedOptionError("FLEX_ATTENTION reads no sharded sequences.")
        if common_prefix_len:
            check_cascade(common, common_prefix_len, block_size=self._block_size or 1)
        batch = HostBatch.of(common, layer.attn_type, self._block_size)
        if visibility.chunk_size is not None and not all(batch.is_causal):
            raise UnsupportedOptionError(
                f"chunk_size={visibility.chunk_size} has no rule for rows that are not causal.",
                hint="a chunk is seen up to the query itself: pass causal=True.",
            )
        spans, blind = spans_of(
            batch.query_starts,
            batch.key_lens,
            is_causal=batch.is_causal,
            visibility=visibility,
            ranges=batch.ranges,
            key_starts=batch.key_starts,
        )
        table = None
        if common.block_table is not None and self._block_size is not None:
            table = PagedTable.read(common.block_table, spans, visibility, self._block_size)
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

    def plan_dense(self, spans: Sequence[Span], table: PagedTable | None) -> tuple[DensePlan, ...]:
        """Return the uncompiled calls of a batch."""
        return plan_dense(spans, table, self._visibility, self._layer.num_heads, self.device)


def _rows_of(slices: Sequence[slice]) -> Tensor:
    ranges = [torch.arange(piece.start, piece.stop) for piece in slices]
    return torch.cat(ranges) if ranges else torch.empty(0, dtype=torch.int64)


class FlexAttentionImpl(AttentionImpl[FlexMetadata]):
    """Runs one layer."""

    can_return_lse = True

    def __init__(self, spec: LayerSpec) -> None:
        """Import flex_attention, and refuse a layer that the capability refuses."""
        super().__init__(spec)
        check_layer(spec)
        self._checker = CallChecker(spec=spec)
        _flex_call.load()

    def forward(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor | None,
        metadata: FlexMetadata,
        output: Tensor | None = None,
        *,
        lse: Tensor | None = None,
    ) -> Tensor:
        """Attend; arguments as the base class has them.

        Raises:
            InvalidInputError: an argument does not fit the layer or the batch.
            UnsupportedOptionError: sinks, slopes or scales that would be dropped.
        """
        spec, num_rows = self.spec, metadata.batch.num_tokens
        self._checker.check_tensors(query, output, lse, num_rows)
        self._checker.check_layer(layer, query.device)
        keys, values = self._sources(query, key, value, kv_cache, metadata)
        if output is None:
            output = query.new_zeros((query.shape[0], spec.num_heads, spec.head_size_v))
        out = output[:num_rows]
        own_lse = lse
        if own_lse is None and layer.sinks is not None:
            own_lse = query.new_empty((spec.num_heads, num_rows), dtype=torch.float32)
        if own_lse is not None:
            own_lse = own_lse[:, :num_rows]
            own_lse.index_fill_(1, metadata.empty_rows, -torch.inf)
        out.index_fill_(0, metadata.empty_rows, 0.0)
        self._attend(layer, query, keys, values, metadata, out, own_lse)
        if layer.sinks is not None and own_lse is not None:
            _add_sinks(out, own_lse, layer.sinks)
        return output

    def _sources(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor | None,
        metadata: FlexMetadata,
    ) -> tuple[Tensor, Tensor]:
        """Return where keys and values are read: views of the cache, or the call's own."""
        if metadata.table is None:
            num_keys = metadata.batch.num_keys
            return self._checker.check_keys(key, value, kv_cache, query.device, num_keys)
        kv_cache, cache_spec = self._checker.check_cache(kv_cache, query.device)
        views = cache_spec.split(kv_cache)
        last = metadata.table.num_spanned - 1
        if last >= kv_cache.shape[0]:
            raise InvalidInputError.for_argument(
                "block_table", f"naming block {last}", f"0 to {kv_cache.shape[0] - 1}"
            )
        return views.key, views.value

    def _attend(
        self,
        layer: AttentionLayer,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        metadata: FlexMetadata,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        """Write the rows that see a key, sinks apart."""
        slopes = layer.alibi_slopes
        options: dict[str, Any] = {
            "scale": self.spec.scale,
            "softcap": self.spec.softcap,
            "slopes": None if slopes is None else slopes.float(),
        }
        plan = metadata.compiled
        # The kernel that torch generates for a CPU returns no LSE.
        if plan is not None and (lse is None or query.device.type != "cpu"):
            result = plan.run(query, keys, values, with_lse=lse is not None, **options)
            _put(plan.rows, result, out, lse)
            return
        for dense in metadata.dense():
            _put(dense.rows, dense.run(query, keys, values, **options), out, lse)


def _put(rows: TileRows, result: _flex_call.FlexResult, out: Tensor, lse: Tensor | None) -> None:
    rows.put(result.output, out)
    if lse is not None and result.lse is not None:
        rows.put_lse(result.lse, lse)


def _add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Let a logit per head, with value zero, into the denominators.

    The denominator grows from exp(lse) to exp(lse) + exp(sink), so that the output shrinks by
    sigmoid(lse - sink); where nothing is seen the output is 0 already, and lse - sink may be NaN.

    Args:
        out: (T, Hq, Dv), written in place.
        lse: (Hq, T) float32, written in place.
        sinks: (Hq,).
    """
    sink = sinks.float().unsqueeze(1)
    share = torch.where(lse == -torch.inf, 0.0, torch.sigmoid(lse - sink))
    out.copy_(out * share.T.unsqueeze(-1))
    lse.copy_(torch.logaddexp(lse, sink.expand_as(lse)))


class FlexAttentionBackend(AttentionBackend):
    """torch's flex_attention, paged by block masks."""

    name: ClassVar[str] = "FLEX_ATTENTION"
    attn_api: ClassVar[str] = ">=1,<2"
    description: ClassVar[str] = "torch.nn.attention.flex_attention, paged by block masks"

    @classmethod
    def capability(cls, device: DeviceFacts, inventory: Inventory) -> Capability:
        """Return what is served on `device`; torch alone decides."""
        return flex_capability(device.vendor)

    @staticmethod
    def get_impl_cls() -> type[FlexAttentionImpl]:
        """Return the class that runs one layer."""
        return FlexAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[FlexMetadataBuilder]:
        """Return the class that prepares each step."""
        return FlexMetadataBuilder

    @classmethod
    def load_vendor(cls, device: DeviceFacts, inventory: Inventory) -> None:
        """Import flex_attention, which brings torch's compiler."""
        _flex_call.load()
