"""A backend for latents, called as an engine calls it, and its answers held to the contract."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attn_conformance.case import Case
from attn_conformance.checks import require
from attn_conformance.mla_batch import MLABatch, make_mla_batch
from attn_conformance.subject import Subject
from attn_shared.accuracy import check_against_reference
from attn_shared.backend import AttentionBackend, MLAAttentionImpl
from attn_shared.merge import to_natural
from attn_shared.mla_builder import MLAMetadataBuilder
from attn_shared.mla_metadata import MLAMetadata
from attn_shared.ordering import ordered
from attn_shared.reference import ReferenceResult
from attn_shared.spec import BuildConfig

__all__ = ["MLAEngine", "MLAResult", "check_mla_numbers", "hold", "mla_batch", "mla_engine"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MLAResult:
    """What one step gave.

    Attributes:
        batch: as it was run, in the builder's order.
        metadata: of the step.
        latents: (n, H, kv_lora_rank) of the decodes.
        values: (m, H, v_head_dim) of the prefills.
        decode_lse: (H, n) natural, if it was asked for.
        prefill_lse: (H, m) likewise.
    """

    batch: MLABatch
    metadata: MLAMetadata[Any]
    latents: Tensor
    values: Tensor
    decode_lse: Tensor | None = None
    prefill_lse: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MLAEngine:
    """Implementation and builder of one backend for the layer of a batch."""

    backend: type[AttentionBackend]
    impl: MLAAttentionImpl[Any]
    builder: MLAMetadataBuilder[Any]

    @classmethod
    def of(cls, backend: type[AttentionBackend], batch: MLABatch, config: BuildConfig) -> MLAEngine:
        """Build both, as an engine does before the first step."""
        impl = backend.get_impl_cls()(batch.spec)
        builder = backend.get_builder_cls()(
            batch.spec.kv_cache_spec, {"layer": batch.spec}, config, batch.device
        )
        require(isinstance(impl, MLAAttentionImpl), f"{type(impl).__name__} is no MLAAttentionImpl")
        is_builder = isinstance(builder, MLAMetadataBuilder)
        require(is_builder, f"{type(builder).__name__} is no MLAMetadataBuilder")
        return cls(backend=backend, impl=impl, builder=builder)  # type: ignore[arg-type]

    def ordered(self, batch: MLABatch) -> MLABatch:
        """Return the batch with its decodes first."""
        threshold = self.builder.reorder_batch_threshold or 1
        if batch.common.max_query_len <= threshold:
            return batch
        common, order = ordered(batch.common, threshold)
        if order is None:
            return batch
        rest = torch.arange(len(order), len(batch.query), device=order.device)
        rows = torch.cat([order, rest])
        moved = {
            name: getattr(batch, name)[rows] for name in ("query", "absorbed", "latent", "rope")
        }
        lens = tuple(common.query_lens_cpu.tolist()), tuple(common.exact_seq_lens_cpu.tolist())
        case = batch.case.with_fields(query_lens=lens[0], seq_lens=lens[1])
        return replace(batch, case=case, common=common, **moved)

    def write(self, batch: MLABatch) -> None:
        """Write the step's new tokens."""
        slots = batch.common.slot_mapping
        if slots is not None:
            self.impl.do_kv_cache_update(
                batch.layer, batch.latent, batch.rope, batch.kv_cache, slots
            )

    def run(self, batch: MLABatch, *, with_lse: bool = False) -> MLAResult:
        """Do one whole step."""
        batch = self.ordered(batch)
        metadata = self.builder.build(0, batch.common)
        self.write(batch)
        return self.attend(batch, metadata, with_lse=with_lse)

    def attend(
        self, batch: MLABatch, metadata: MLAMetadata[Any], *, with_lse: bool = False
    ) -> MLAResult:
        """Run decodes and prefills of a step whose tokens are written."""
        count, total = metadata.num_decode_tokens, metadata.num_tokens
        latents, decode_lse = self.decode(batch, metadata, with_lse=with_lse)
        heads, dims = batch.spec.num_heads, batch.dims
        values = batch.query.new_full((total - count, heads, dims.v_head_dim), torch.nan)
        prefill_lse = _nan_lse(batch, total - count) if with_lse else None
        if count < total:
            rows = slice(count, total)
            self.impl.forward_mha(
                batch.layer,
                batch.query[rows],
                batch.latent[rows],
                batch.rope[rows],
                batch.kv_cache,
                metadata,
                values,
                lse=prefill_lse,
            )
        return MLAResult(
            batch=batch,
            metadata=metadata,
            latents=latents[:count],
            values=values,
            decode_lse=None if decode_lse is None else decode_lse[:, :count],
            prefill_lse=prefill_lse,
        )

    def decode(
        self, batch: MLABatch, metadata: MLAMetadata[Any], *, with_lse: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Run the decodes, with all rows of the batch behind them."""
        if not metadata.num_decode_tokens:
            empty = batch.absorbed[:0, :, : batch.dims.kv_lora_rank]
            return empty, (_nan_lse(batch, 0) if with_lse else None)
        lse = _nan_lse(batch, len(batch.absorbed)) if with_lse else None
        shape = (*batch.absorbed.shape[:2], batch.dims.kv_lora_rank)
        output = batch.absorbed.new_full(shape, torch.nan)
        arguments = (batch.layer, batch.absorbed, batch.kv_cache, metadata, output)
        if lse is None:
            return self.impl.forward_mqa(*arguments), None
        found = self.impl.forward_mqa(*arguments, lse=lse)
        return found, to_natural(lse, lse_base_on_e=self.impl.lse_base_on_e)


def _nan_lse(batch: MLABatch, count: int) -> Tensor:
    return batch.query.new_full((batch.spec.num_heads, count), torch.nan, dtype=torch.float32)


def mla_batch(subject: Subject, case: Case) -> MLABatch:
    """Make the tensors of a case on the subject's device."""
    flavour = subject.facts.fp8_dtype or torch.float8_e4m3fn
    batch = make_mla_batch(case, subject.device, fp8_e4m3_dtype=flavour)
    return replace(batch, fp8_products=subject.capability.fp8_products)


def mla_engine(subject: Subject, batch: MLABatch, **config: Any) -> MLAEngine:
    """Build implementation and builder for a batch's layer; `config` as in `Subject.engine`."""
    options = {"batch_invariant": batch.case.batch_invariant, **config}
    return MLAEngine.of(subject.backend, batch, BuildConfig(**options))


def hold(result: MLAResult, what: str = "") -> None:
    """Hold a step's answers to the budget, decodes and prefills each by their own yardstick.

    Raises:
        Violation: with the numbers and the case.
    """
    batch, count = result.batch, result.metadata.num_decode_tokens
    prefix = f"{what}: " if what else ""
    if count:
        expected = [_rows(each, 0, count) for each in batch.expected_decode()]
        _hold(f"{prefix}decodes", batch, result.latents, result.decode_lse, *expected)
    if count < result.metadata.num_tokens:
        stop = result.metadata.num_tokens
        expected = [_rows(each, count, stop) for each in batch.expected_prefill()]
        _hold(f"{prefix}prefills", batch, result.values, result.prefill_lse, *expected)


def _rows(result: ReferenceResult, start: int, stop: int) -> ReferenceResult:
    return replace(
        result,
        output=result.output[start:stop],
        lse=result.lse[:, start:stop],
        num_tokens=stop - start,
    )


def _hold(
    what: str,
    batch: MLABatch,
    output: Tensor,
    lse: Tensor | None,
    exact: ReferenceResult,
    eager: ReferenceResult,
) -> None:
    words = str(batch.case)
    found = tuple(output.shape), output.dtype
    wanted = tuple(exact.output.shape), batch.case.dtype
    require(found == wanted, f"{what}: output is {found}, not {wanted} in {words}")
    home = exact.output.device
    report = check_against_reference(
        output.to(home),
        None if lse is None else lse.to(home),
        exact,
        eager,
        dtype=batch.case.dtype,
    )
    require(report.ok, f"{what}: {report} in {words}")


def check_mla_numbers(subject: Subject, case: Case, **config: Any) -> None:
    """Run one step, without LSE and with it where it is served, and hold both to the budget."""
    batch = mla_batch(subject, case)
    engine = mla_engine(subject, batch, **config)
    hold(engine.run(batch))
    if subject.returns_lse_of(case):
        hold(engine.run(batch, with_lse=True), "with LSE")
