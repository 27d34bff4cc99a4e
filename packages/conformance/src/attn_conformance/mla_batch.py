"""The tensors of a case of latent attention, and the answers that the contract asks for.

Decodes are held to attention over latents by a query that was absorbed exactly and then rounded;
prefills to attention over keys and values that every entry of the cache is expanded to. As in
ordinary batches, what nobody may read holds NaN, and the step's new tokens are not written yet.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attn_conformance._caches import LatentEntries, filled_cache, latent_spec
from attn_conformance._tables import Placement, place
from attn_conformance.batch import describe
from attn_conformance.case import Case
from attn_shared import reference
from attn_shared.accuracy import eager_mla_decode
from attn_shared.kv_cache import MLAAttentionSpec
from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.mla_reference import eager_mla_attention, mla_attention
from attn_shared.quantization import FP8_DTYPES
from attn_shared.reference import ReferenceResult
from attn_shared.request import MLADims
from attn_shared.spec import LayerSpec

__all__ = ["MLABatch", "MLACaseLayer", "make_mla_batch"]

_MEAN = 1.0  # of latents, so that an error in the denominator does not average out
_KNOW_FLOAT64 = ("cpu", "cuda")


@dataclass(slots=True, kw_only=True, eq=False)
class MLACaseLayer:
    """What an implementation reads of the layer that calls it; see `impl.MLALayer`."""

    kv_b_proj: Tensor | None
    q_scale: float | Tensor = 1.0
    k_scale: float | Tensor = 1.0
    v_scale: float | Tensor = 1.0
    sinks: Tensor | None = None
    alibi_slopes: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MLABatch:
    """A case of latent attention as tensors.

    Attributes:
        case: what was asked for.
        device: where the tensors are.
        spec: the layer's description.
        layer: the cache's scale and the up-projection.
        common: the batch's description.
        query: (T + padding, H, nope + rope).
        absorbed: (T + padding, H, latent_size), the same query for attention over latents.
        latent: (T + padding, kv_lora_rank).
        rope: (T + padding, qk_rope_head_dim).
        kv_cache: without the step's new tokens.
        written_cache: the same with them, as torch writes them.
        placement: which blocks are in use.
        fp8_products: over an fp8 cache eager decodes multiply in the cache's dtype.
    """

    case: Case
    device: torch.device
    spec: LayerSpec
    layer: MLACaseLayer
    common: CommonAttentionMetadata
    query: Tensor
    absorbed: Tensor
    latent: Tensor
    rope: Tensor
    kv_cache: Tensor
    written_cache: Tensor
    placement: Placement
    fp8_products: bool = False

    @property
    def dims(self) -> MLADims:
        """Widths."""
        return self.spec.mla or MLADims()

    def expected_decode(self) -> tuple[ReferenceResult, ReferenceResult]:
        """Return the answer of every row over latents, in float64 and of eager attention."""
        arguments = self._arguments() | {"kv_lora_rank": self.dims.kv_lora_rank}
        tensors = (_home(self.absorbed), _home(self.written_cache))
        dtype = self.written_cache.dtype
        compute = dtype if self.fp8_products and dtype in FP8_DTYPES else None
        return (
            reference.mla_decode(*tensors, **arguments),
            eager_mla_decode(*tensors, **arguments, compute_dtype=compute),
        )

    def expected_prefill(self) -> tuple[ReferenceResult, ReferenceResult]:
        """Return the answer of every row by expanded heads, in float64 and of eager attention."""
        if self.layer.kv_b_proj is None:
            raise TypeError("a batch of latent attention has its projection")
        tensors = (
            _home(self.query),
            _home(self.written_cache),
            _home(self.layer.kv_b_proj),
            self.dims,
        )
        arguments = self._arguments()
        return mla_attention(*tensors, **arguments), eager_mla_attention(*tensors, **arguments)

    def _arguments(self) -> dict[str, Any]:
        common = self.common
        if common.block_table is None:
            raise TypeError("a batch over a cache has a block table")
        return {
            "scale": self.spec.scale,
            "query_start_loc": common.query_start_loc_cpu,
            "seq_lens": torch.tensor(self.case.seq_lens, dtype=torch.int32),
            "block_table": common.block_table.cpu(),
            "causal": common.causal,
            "cache_scale": self.layer.k_scale,
        }


def _home(tensor: Tensor) -> Tensor:
    """Return a tensor where float64 is known."""
    return tensor if tensor.device.type in _KNOW_FLOAT64 else tensor.cpu()


def make_mla_batch(
    case: Case,
    device: torch.device | str = "cpu",
    *,
    fp8_e4m3_dtype: torch.dtype = torch.float8_e4m3fn,
) -> MLABatch:
    """Make the tensors of a case of latent attention.

    Args:
        case: what they describe; `case.mla` is set.
        device: where they go.
        fp8_e4m3_dtype: the device's e4m3 flavour.
    """
    maker = _Maker(case, torch.device(device))
    spec = latent_spec(case, fp8_e4m3_dtype)
    weight, query = maker.weight(), maker.query()
    latent, rope = maker.entries(case.num_tokens, case.num_padding_rows)
    step = spec.page_size_bytes // spec.dtype.itemsize
    placement = place(case, maker.generator, block_elements=step)
    caches = maker.caches(spec, placement, latent, rope)
    layer = MLACaseLayer(kv_b_proj=weight, k_scale=maker.scale, v_scale=maker.scale)
    common = describe(case, placement, maker.device)
    return MLABatch(
        case=case,
        device=maker.device,
        spec=LayerSpec.from_request(case.request, scale=case.softmax_scale, kv_cache_spec=spec),
        layer=layer,
        common=common.with_fields(block_size=case.block_size),
        query=query,
        absorbed=maker.absorbed(query, weight),
        latent=latent,
        rope=rope,
        kv_cache=caches[0],
        written_cache=caches[1],
        placement=placement,
    )


class _Maker:
    """Draws the numbers of one case, always in the same order."""

    def __init__(self, case: Case, device: torch.device) -> None:
        if case.mla is None:
            raise TypeError(f"{case.name} is no case of latent attention")
        self.case, self.dims, self.device = case, case.mla, device
        self.generator = torch.Generator().manual_seed(case.seed)
        self.scale: float | Tensor = case.k_scale if isinstance(case.k_scale, float) else 1.0
        if not isinstance(case.k_scale, float):
            self.scale = torch.tensor(case.k_scale, dtype=torch.float32, device=device)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def cast(self, values: Tensor) -> Tensor:
        return values.to(self.case.dtype).to(self.device)

    def weight(self) -> Tensor:
        """Return kv_b_proj, of a size that keeps keys and values near 1."""
        dims = self.dims
        rows = self.case.num_heads * (dims.qk_nope_head_dim + dims.v_head_dim)
        return self.cast(self.normal(rows, dims.kv_lora_rank) * dims.kv_lora_rank**-0.5)

    def query(self) -> Tensor:
        """Return (T + padding, H, nope + rope); the padding is NaN."""
        case, dims = self.case, self.dims
        width = dims.qk_nope_head_dim + dims.qk_rope_head_dim
        rows = self.normal(case.num_tokens + case.num_padding_rows, case.num_heads, width)
        rows = rows * case.query_factor
        rows[case.num_tokens :] = torch.nan
        return self.cast(rows)

    def absorbed(self, query: Tensor, weight: Tensor) -> Tensor:
        """Return the query that attends to latents, rounded once."""
        dims, heads = self.dims, self.case.num_heads
        rows = weight.cpu().view(heads, -1, dims.kv_lora_rank)
        key_up = rows[:, : dims.qk_nope_head_dim].permute(2, 0, 1)
        return self.cast(reference.mla_absorb_query(query.cpu(), key_up))

    def entries(self, count: int, padding: int = 0) -> tuple[Tensor, Tensor]:
        """Return latents and rope parts; padding behind them is NaN."""
        rows = self.normal(count + padding, self.dims.latent_size)
        rows[:, : self.dims.kv_lora_rank] += _MEAN
        rows[count:] = torch.nan
        latent, rope = self.cast(rows).split(
            [self.dims.kv_lora_rank, self.dims.qk_rope_head_dim], dim=1
        )
        return latent.contiguous(), rope.contiguous()

    def caches(
        self, spec: MLAAttentionSpec, placement: Placement, latent: Tensor, rope: Tensor
    ) -> list[Tensor]:
        """Return the cache before and after the step's tokens are written."""
        slots = placement.live_slots
        old = self.entries(len(slots))
        new = placement.new_slots if self.case.writes else ()
        kept = [index for index, slot in enumerate(slots) if slot not in set(new)]
        before = LatentEntries(
            latent=old[0][kept],
            rope=old[1][kept],
            slots=tuple(slots[index] for index in kept),
            scale=self.scale,
        )
        after = replace(
            before,
            latent=torch.cat([before.latent, latent[: len(new)]]),
            rope=torch.cat([before.rope, rope[: len(new)]]),
            slots=before.slots + new,
        )
        return [
            filled_cache(self.case, spec, placement, entries, self.device)
            for entries in (before, after)
        ]
