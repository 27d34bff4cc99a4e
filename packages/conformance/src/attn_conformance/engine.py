"""A backend's objects for one layer, called as an engine calls them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attn_conformance.batch import Batch
from attn_shared.backend import AttentionBackend, AttentionImpl, AttentionMetadataBuilder
from attn_shared.merge import to_natural
from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.ordering import ordered
from attn_shared.spec import BuildConfig

__all__ = ["Engine", "Result"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Result:
    """What one call gave: output (T, Hq, Dv) and natural-log LSE (Hq, T), if it was asked for."""

    output: Tensor
    lse: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Engine:
    """Implementation and builder of one backend for the layer of a batch."""

    backend: type[AttentionBackend]
    impl: AttentionImpl[Any]
    builder: AttentionMetadataBuilder[Any]

    @classmethod
    def of(cls, backend: type[AttentionBackend], batch: Batch, config: BuildConfig) -> Engine:
        """Build both, as an engine does before the first step."""
        impl = backend.get_impl_cls()(batch.spec)
        if not isinstance(impl, AttentionImpl):
            raise TypeError(f"{backend.name}: {type(impl).__name__} is no AttentionImpl")
        builder = backend.get_builder_cls()(
            batch.spec.kv_cache_spec, {"layer": batch.spec}, config, batch.device
        )
        return cls(backend=backend, impl=impl, builder=builder)

    def plan(self, batch: Batch) -> Any:
        """Return the metadata of the batch as it stands."""
        return self.builder.build(batch.case.common_prefix_len, batch.common)

    def write(self, batch: Batch) -> None:
        """Write the step's new tokens, where the layer does that."""
        slots = batch.common.slot_mapping
        if self.backend.forward_includes_kv_cache_update or slots is None:
            return
        if batch.key is not None and batch.value is not None and batch.kv_cache is not None:
            self.impl.do_kv_cache_update(batch.layer, batch.key, batch.value, batch.kv_cache, slots)

    def forward(
        self,
        batch: Batch,
        metadata: Any,
        *,
        output: Tensor | None = None,
        with_lse: bool = False,
    ) -> Result:
        """Attend, and return the output and, if asked for, the LSE."""
        rows, heads = batch.query.shape[:2]
        lse = batch.query.new_full((heads, rows), torch.nan, dtype=torch.float32)
        arguments = (batch.layer, batch.query, batch.key, batch.value, batch.kv_cache, metadata)
        if not with_lse:
            return Result(output=self.impl.forward(*arguments, output))
        result = self.impl.forward(*arguments, output, lse=lse)
        return Result(output=result, lse=to_natural(lse, lse_base_on_e=self.impl.lse_base_on_e))

    def run(self, batch: Batch, *, with_lse: bool = False) -> Result:
        """Do one whole step; a batch in another order than the builder needs is put in order."""
        if not self.builder.requires_ordered_batch:
            return self._step(batch, with_lse=with_lse)
        threshold = self.builder.reorder_batch_threshold or 1
        common, order = ordered(batch.common, threshold)
        if order is None:
            return self._step(batch, with_lse=with_lse)
        result = self._step(_reordered(batch, common, order), with_lse=with_lse)
        return _put_back(result, order, len(batch.query))

    def _step(self, batch: Batch, *, with_lse: bool) -> Result:
        metadata = self.plan(batch)
        self.write(batch)
        output = _empty_output(batch)
        return self.forward(batch, metadata, output=output, with_lse=with_lse)


def _empty_output(batch: Batch) -> Tensor:
    """Return NaN where the output goes, so that what is not written shows."""
    shape = (*batch.query.shape[:2], batch.spec.head_size_v)
    return batch.query.new_full(shape, torch.nan)


def _reordered(batch: Batch, common: CommonAttentionMetadata, order: Tensor) -> Batch:
    """Return the batch with its query rows, and the keys and values beside them, in an order."""
    rows = torch.cat([order, torch.arange(len(order), len(batch.query), device=order.device)])
    key, value = batch.key, batch.value
    if key is not None and value is not None and not batch.case.is_cross:
        key, value = key[rows], value[rows]
    return replace(batch, common=common, query=batch.query[rows], key=key, value=value)


def _put_back(result: Result, order: Tensor, num_rows: int) -> Result:
    output = result.output.new_full((num_rows, *result.output.shape[1:]), torch.nan)
    output[order] = result.output[: len(order)]
    if result.lse is None:
        return Result(output=output)
    lse = result.lse.new_full((len(result.lse), num_rows), torch.nan)
    lse[:, order] = result.lse[:, : len(order)]
    return Result(output=output, lse=lse)
