"""The tensors of a case, on a device, and the answer that the contract asks for.

Everything that nobody may read holds NaN (or block ids outside the cache), and slots past a
sequence's end hold the largest finite number of their dtype. The new tokens of the step are not
in the cache yet: the backend writes them, as in an engine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from attn_conformance._caches import Entries, cache_spec, filled_cache, host_cache
from attn_conformance._tables import Placement, place
from attn_conformance.case import Case, Scale
from attn_shared import reference
from attn_shared.accuracy import eager_attention, eager_varlen_attention
from attn_shared.kv_cache import AttentionSpec
from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.quantization import FP8_DTYPES
from attn_shared.reference import AttentionOptions, ReferenceResult
from attn_shared.request import AttentionType
from attn_shared.spec import LayerSpec

__all__ = ["Batch", "Layer", "describe", "make_batch"]

_VALUE_MEAN = 1.0  # so that an error in the denominator does not average out over values
_KNOW_FLOAT64 = ("cpu", "cuda")  # elsewhere the reference computes in host memory
_DECODED = 3  # tokens that a cross-attending decoder has seen before this step


@dataclass(slots=True, kw_only=True, eq=False)
class Layer:
    """What an implementation reads of the layer that calls it; see `backend.AttentionLayer`."""

    q_scale: float | Tensor = 1.0
    k_scale: float | Tensor = 1.0
    v_scale: float | Tensor = 1.0
    sinks: Tensor | None = None
    alibi_slopes: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """A case as tensors.

    Attributes:
        case: what was asked for.
        device: where the tensors are.
        spec: the layer's description.
        layer: scales, sinks and slopes.
        common: the batch's description.
        query: (T + padding, Hq, D).
        key: (T + padding, Hkv, D), or None where the cache alone is read.
        value: (T + padding, Hkv, Dv), or None.
        kv_cache: without the step's new tokens; None for cache-free attention.
        written_cache: the same with them, as torch writes them.
        placement: which blocks are in use.
    """

    case: Case
    device: torch.device
    spec: LayerSpec
    layer: Layer
    common: CommonAttentionMetadata
    query: Tensor
    key: Tensor | None
    value: Tensor | None
    kv_cache: Tensor | None
    written_cache: Tensor | None
    placement: Placement | None

    @property
    def options(self) -> AttentionOptions:
        """The layer's options in the reference's words."""
        return AttentionOptions(
            scale=self.spec.scale,
            window=self.spec.window,
            softcap=self.spec.softcap,
            alibi_slopes=self.layer.alibi_slopes,
            sinks=self.layer.sinks,
            chunk_size=self.spec.chunk_size,
        )

    def expected(
        self, *, reads_fresh_kv: bool = False, fp8_products: bool = False
    ) -> tuple[ReferenceResult, ReferenceResult]:
        """Return the float64 answer, and eager attention's in the compute dtype.

        Args:
            reads_fresh_kv: the step's new tokens are read as they are handed over, not as stored.
            fp8_products: over an fp8 cache eager attention multiplies in the cache's dtype.
        """
        if self.device.type not in _KNOW_FLOAT64:
            host = self.on_host()
            return host.expected(reads_fresh_kv=reads_fresh_kv, fp8_products=fp8_products)
        if self.case.is_cache_free:
            return self._expected_cache_free()
        if self.written_cache is None or not isinstance(self.spec.kv_cache_spec, AttentionSpec):
            raise TypeError("a batch over a cache has one")
        views = self.spec.kv_cache_spec.split(self.written_cache)
        arguments = self._reference_arguments(reads_fresh_kv)
        arguments |= {"key_scales": views.key_scale, "value_scales": views.value_scale}
        tensors = (self.query, views.key, views.value)
        eager: dict[str, Any] = {}
        if fp8_products and views.key.dtype in FP8_DTYPES:
            eager = {"compute_dtype": views.key.dtype, "q_scale": self.layer.q_scale}
        return (
            reference.paged_attention(*tensors, self.options, **arguments),
            eager_attention(*tensors, self.options, **(arguments | eager)),
        )

    def on_host(self) -> Batch:
        """Return the batch with all tensors in host memory, strides kept."""
        layer = {item.name: _to_host(getattr(self.layer, item.name)) for item in fields(Layer)}
        common = {
            item.name: _to_host(getattr(self.common, item.name)) for item in fields(self.common)
        }
        return replace(
            self,
            device=torch.device("cpu"),
            layer=Layer(**layer),
            common=self.common.with_fields(**common),
            query=_to_host(self.query),
            key=_to_host(self.key),
            value=_to_host(self.value),
            kv_cache=None if self.kv_cache is None else host_cache(self.kv_cache),
            written_cache=None if self.written_cache is None else host_cache(self.written_cache),
        )

    def _reference_arguments(self, reads_fresh_kv: bool) -> dict[str, Any]:
        common = self.common
        is_decoder = self.case.attn_type is AttentionType.DECODER
        is_fresh = reads_fresh_kv and self.key is not None and is_decoder
        return {
            "query_start_loc": common.query_start_loc,
            "seq_lens": torch.tensor(self.case.seq_lens, dtype=torch.int32),
            "block_table": common.block_table,
            "causal": common.causal if is_decoder else False,
            "mm_prefix_ranges": self.case.mm_prefix_ranges,
            "k_scale": self.layer.k_scale,
            "v_scale": self.layer.v_scale,
            "fresh_key": self.key if is_fresh else None,
            "fresh_value": self.value if is_fresh else None,
        }

    def _expected_cache_free(self) -> tuple[ReferenceResult, ReferenceResult]:
        if self.key is None or self.value is None:
            raise TypeError("a cache-free batch brings its keys")
        common = self.common
        starts = {
            "query_start_loc": common.query_start_loc,
            "key_start_loc": common.query_start_loc
            if common.key_start_loc is None
            else common.key_start_loc,
        }
        tensors = (self.query, self.key, self.value)
        return (
            reference.varlen_attention(*tensors, self.options, causal=False, **starts),
            eager_varlen_attention(*tensors, self.options, causal=False, **starts),
        )


def _to_host(value: Any) -> Any:
    return value.cpu() if isinstance(value, Tensor) else value


def make_batch(
    case: Case,
    device: torch.device | str = "cpu",
    *,
    fp8_e4m3_dtype: torch.dtype = torch.float8_e4m3fn,
) -> Batch:
    """Make the tensors of a case.

    Args:
        case: what they describe.
        device: where they go.
        fp8_e4m3_dtype: the device's e4m3 flavour.
    """
    maker = _Maker(case, torch.device(device))
    spec = cache_spec(case, fp8_e4m3_dtype)
    layer = maker.layer()
    query = maker.query()
    key, value = maker.new_rows()
    if spec is None:
        return maker.batch(spec, layer, query, key, value)
    step = spec.page_size_bytes // spec.dtype.itemsize
    placement = place(case, maker.generator, block_elements=step)
    scales = {"k_scale": layer.k_scale, "v_scale": layer.v_scale}
    old = maker.entries(placement.live_slots, scales)
    written = old
    if case.writes:
        new = Entries(key=key, value=value, slots=placement.new_slots, **scales)
        old, written = old.without(new.slots), old.without(new.slots).followed_by(new)
    caches = [
        filled_cache(case, spec, placement, entries, maker.device) for entries in (old, written)
    ]
    return maker.batch(spec, layer, query, key, value, placement, caches)


class _Maker:
    """Draws the numbers of one case, always in the same order."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case = case
        self.device = device
        self.generator = torch.Generator().manual_seed(case.seed)

    def normal(self, *shape: int) -> Tensor:
        """Draw normal numbers of the case's dtype, float32 ones rounded to it."""
        return torch.randn(shape, generator=self.generator).to(self.device, self.case.dtype)

    def query(self) -> Tensor:
        """Return (T + padding, Hq, D); the padding is NaN."""
        case = self.case
        rows = self.normal(case.num_tokens + case.num_padding_rows, case.num_heads, case.head_size)
        rows = rows * case.query_factor
        rows[case.num_tokens :] = torch.nan
        return rows

    def new_rows(self) -> tuple[Tensor, Tensor]:
        """Return keys and values that come with the call; the padding is NaN."""
        case = self.case
        has_own_rows = case.is_cache_free or case.is_cross
        count = sum(case.seq_lens) if has_own_rows else case.num_tokens
        key, value = self._keys_values(count + case.num_padding_rows)
        key[count:], value[count:] = torch.nan, torch.nan
        return key, value

    def entries(self, slots: tuple[int, ...], scales: dict[str, float | Tensor]) -> Entries:
        """Return random keys and values for slots of the cache."""
        key, value = self._keys_values(len(slots))
        return Entries(key=key, value=value, slots=slots, **scales)

    def _keys_values(self, count: int) -> tuple[Tensor, Tensor]:
        case = self.case
        key = self.normal(count, case.num_kv_heads, case.head_size)
        value = self.normal(count, case.num_kv_heads, case.value_size) + _VALUE_MEAN
        return key, value

    def layer(self) -> Layer:
        """Return scales, sinks and slopes.

        A sink weighs about as much as all keys together, so that counting it twice shows.
        """
        case = self.case
        longest = max(case.seq_lens, default=0)
        sinks = torch.randn(case.num_heads, generator=self.generator) + math.log1p(longest)
        slopes = torch.rand(case.num_heads, generator=self.generator) + 0.05
        return Layer(
            k_scale=self._scale(case.k_scale),
            v_scale=self._scale(case.v_scale),
            sinks=sinks.to(self.device) if case.has_sinks else None,
            alibi_slopes=slopes.to(self.device) if case.has_alibi else None,
        )

    def _scale(self, scale: Scale) -> float | Tensor:
        if isinstance(scale, float):
            return scale
        return torch.tensor(scale, dtype=torch.float32, device=self.device)

    def batch(
        self,
        spec: AttentionSpec | None,
        layer: Layer,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        placement: Placement | None = None,
        caches: Sequence[Tensor | None] = (None, None),
    ) -> Batch:
        """Put the parts together."""
        case = self.case
        is_handed_over = case.writes or case.is_cache_free
        return Batch(
            case=case,
            device=self.device,
            spec=LayerSpec.from_request(case.request, scale=case.softmax_scale, kv_cache_spec=spec),
            layer=layer,
            common=describe(case, placement, self.device),
            query=query,
            key=key if is_handed_over else None,
            value=value if is_handed_over else None,
            kv_cache=caches[0],
            written_cache=caches[1],
            placement=placement,
        )


def describe(
    case: Case, placement: Placement | None, device: torch.device
) -> CommonAttentionMetadata:
    """Return the description of a case's batch."""
    seq_lens = list(case.seq_lens)
    options: dict[str, Any] = {"mm_prefix_ranges": case.mm_prefix_ranges}
    if case.is_cross:
        lens = torch.tensor(seq_lens, dtype=torch.int32)
        options |= {"encoder_seq_lens": lens.to(device), "encoder_seq_lens_cpu": lens}
        seq_lens = [length + _DECODED if length else 0 for length in case.query_lens]
    if case.is_cache_free and list(case.query_lens) != seq_lens:
        starts = torch.tensor([0, *seq_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        options |= {"key_start_loc": starts.to(device), "key_start_loc_cpu": starts}
    options |= _causality(case, device)
    if case.is_prefilling is not None:
        options["is_prefilling"] = torch.tensor(case.is_prefilling, dtype=torch.bool)
    if placement is not None and case.writes:
        slots = torch.tensor(placement.new_slots, dtype=torch.int64)
        options["slot_mapping"] = slots.to(device)
    common = CommonAttentionMetadata.from_lengths(
        query_lens=list(case.query_lens),
        seq_lens=seq_lens,
        block_table=None if placement is None else placement.table,
        device=device,
        **options,
    )
    return _with_slack(common, case.seq_lens_slack)


def _causality(case: Case, device: torch.device) -> dict[str, Any]:
    if isinstance(case.causal, bool):
        return {"causal": case.causal and case.attn_type is AttentionType.DECODER}
    flags = torch.tensor(case.causal, dtype=torch.bool)
    return {"causal": flags.to(device), "causal_cpu": flags}


def _with_slack(common: CommonAttentionMetadata, slack: int) -> CommonAttentionMetadata:
    """Turn the host's lengths into upper bounds."""
    if not slack or common.seq_lens_cpu is None:
        return common
    return common.with_fields(
        seq_lens_cpu=common.seq_lens_cpu + slack,
        seq_lens_cpu_is_exact=False,
        max_seq_len=common.max_seq_len + slack,
    )
