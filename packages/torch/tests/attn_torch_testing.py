"""Batches for the tests of this package: caches with poison where nobody may read, and answers.

    batch = Case(query_lens=(1, 5), seq_lens=(9, 5)).build()
    output, lse = batch.run(TorchSDPABackend)
    batch.check(output, lse)

Everything that the contract forbids to read holds NaN (or block ids outside the cache), and slots
past a sequence's end hold the largest finite number of their dtype.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from attn_shared import reference
from attn_shared.accuracy import (
    check_against_reference,
    eager_attention,
    eager_varlen_attention,
)
from attn_shared.backend import AttentionBackend
from attn_shared.dtypes import KVCacheLayout
from attn_shared.kv_cache import AttentionSpec, KVViews, spec_for
from attn_shared.kv_write import write_kv
from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.reference import AttentionOptions, ReferenceResult
from attn_shared.request import AttentionRequest, AttentionType, Window
from attn_shared.spec import BuildConfig, LayerSpec

__all__ = ["Batch", "Case", "run"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A batch in words; `build` makes its tensors.

    seq_lens are key lengths: of the cache for decoders, of the encoder for cross-attention, of the
    keys that come with the call for encoders. num_padding_rows query rows follow the last request.
    block_padding elements follow each cache block.
    """

    query_lens: Sequence[int]
    seq_lens: Sequence[int]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 16
    head_size_v: int | None = None
    dtype: torch.dtype = torch.float32
    kv_cache_dtype: str = "auto"
    fp8_e4m3_dtype: torch.dtype = torch.float8_e4m3fn
    block_size: int = 4
    block_padding: int = 0
    layout: KVCacheLayout = KVCacheLayout.NHD
    attn_type: AttentionType = AttentionType.DECODER
    causal: bool | Sequence[bool] = True
    window: Window = (None, None)
    chunk_size: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    has_alibi: bool = False
    mm_prefix_ranges: Mapping[int, Sequence[tuple[int, int]]] = field(default_factory=dict)
    k_scale: float | Tensor = 1.0
    v_scale: float | Tensor = 1.0
    scale: float | None = None
    num_padding_rows: int = 0
    batch_invariant: bool = False
    device: str = "cpu"
    seed: int = 0

    @property
    def request(self) -> AttentionRequest:
        """What the batch's layer asks of a backend."""
        causal = self.causal
        return AttentionRequest(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            head_size_v=self.head_size_v,
            dtype=self.dtype,
            kv_cache_dtype=self.kv_cache_dtype,
            block_size=self.block_size,
            kv_layout=self.layout,
            attn_type=self.attn_type,
            non_causal=causal is False and self.attn_type is AttentionType.DECODER,
            per_request_causal=not isinstance(causal, bool),
            use_mm_prefix=bool(self.mm_prefix_ranges),
            window=self.window,
            chunk_size=self.chunk_size,
            softcap=self.softcap,
            has_sinks=self.has_sinks,
            has_alibi=self.has_alibi,
            batch_invariant=self.batch_invariant,
            per_head_quant_scales=isinstance(self.k_scale, Tensor) and self.k_scale.numel() > 1,
        )

    @property
    def is_cache_free(self) -> bool:
        """Whether keys and values come with the call."""
        return self.request.is_cache_free

    def with_fields(self, **changes: Any) -> Case:
        """Return a copy with some fields changed."""
        return replace(self, **changes)

    def build(self) -> Batch:
        """Make the tensors."""
        return _build(self)


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """The tensors of a case. `common` is the batch's description, `layer` carries its scales."""

    case: Case
    spec: LayerSpec
    layer: SimpleNamespace
    common: CommonAttentionMetadata
    query: Tensor
    key: Tensor | None
    value: Tensor | None
    kv_cache: Tensor | None

    def run(
        self, backend: type[AttentionBackend], *, with_lse: bool = True, **config: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Return output and LSE of a backend; `config` are fields of BuildConfig."""
        return run(self, backend, with_lse=with_lse, **config)

    @property
    def options(self) -> AttentionOptions:
        """The layer's options in the reference's words."""
        return AttentionOptions(
            scale=self.spec.scale,
            window=self.case.window,
            softcap=self.case.softcap,
            alibi_slopes=self.layer.alibi_slopes,
            sinks=self.layer.sinks,
            chunk_size=self.case.chunk_size,
        )

    def expected(self) -> tuple[ReferenceResult, ReferenceResult]:
        """Return the float64 answer, and eager attention's in the compute dtype."""
        if self.case.is_cache_free:
            return self._expected_cache_free()
        assert self.kv_cache is not None
        assert isinstance(self.spec.kv_cache_spec, AttentionSpec)
        views = self.spec.kv_cache_spec.split(self.kv_cache)
        common, case = self.common, self.case
        arguments: dict[str, Any] = {
            "query_start_loc": common.query_start_loc,
            "seq_lens": torch.tensor(list(case.seq_lens), dtype=torch.int32),
            "block_table": common.block_table,
            "causal": False if case.attn_type is not AttentionType.DECODER else common.causal,
            "mm_prefix_ranges": case.mm_prefix_ranges,
            "k_scale": case.k_scale,
            "v_scale": case.v_scale,
            "key_scales": views.key_scale,
            "value_scales": views.value_scale,
        }
        tensors = (self.query, views.key, views.value)
        return (
            reference.paged_attention(*tensors, self.options, **arguments),
            eager_attention(*tensors, self.options, **arguments),
        )

    def _expected_cache_free(self) -> tuple[ReferenceResult, ReferenceResult]:
        assert self.key is not None
        assert self.value is not None
        key_start_loc = self.common.key_start_loc
        starts = {
            "query_start_loc": self.common.query_start_loc,
            "key_start_loc": self.common.query_start_loc
            if key_start_loc is None
            else key_start_loc,
        }
        tensors = (self.query, self.key, self.value)
        return (
            reference.varlen_attention(*tensors, self.options, causal=False, **starts),
            eager_varlen_attention(*tensors, self.options, causal=False, **starts),
        )

    def check(self, output: Tensor, lse: Tensor | None = None) -> None:
        """Hold a result to the error budget of the contract."""
        exact, eager = self.expected()
        report = check_against_reference(output, lse, exact, eager, dtype=self.case.dtype)
        assert report.ok, f"{report} in {self.case}"


def run(
    batch: Batch,
    backend: type[AttentionBackend],
    *,
    with_lse: bool = True,
    output: Tensor | None = None,
    **config: Any,
) -> tuple[Tensor, Tensor | None]:
    """Build the backend's implementation and metadata, and run one call."""
    impl = backend.get_impl_cls()(batch.spec)
    builder = backend.get_builder_cls()(
        batch.spec.kv_cache_spec,
        {"layer": batch.spec},
        BuildConfig(**config),
        torch.device(batch.case.device),
    )
    metadata = builder.build(0, batch.common)
    rows, heads = batch.query.shape[:2]
    lse = batch.query.new_full((heads, rows), torch.nan, dtype=torch.float32) if with_lse else None
    result = impl.forward(  # type: ignore[attr-defined]
        batch.layer,
        batch.query,
        batch.key,
        batch.value,
        batch.kv_cache,
        metadata,
        output,
        lse=lse,
    )
    return result, lse


def _build(case: Case) -> Batch:
    generator = torch.Generator().manual_seed(case.seed)
    num_tokens = sum(case.query_lens)
    head_size_v = case.head_size_v or case.head_size
    query = _random(generator, case, num_tokens + case.num_padding_rows, case.num_heads)
    query[num_tokens:] = torch.nan
    keys = _random(generator, case, sum(case.seq_lens), case.num_kv_heads)
    values = _random(generator, case, sum(case.seq_lens), case.num_kv_heads, head_size_v)
    cache_spec = None if case.is_cache_free else _cache_spec(case)
    table, kv_cache = None, None
    if cache_spec is not None:
        table = _block_table(case, generator)
        kv_cache = _filled_cache(case, cache_spec, table, keys, values)
    return Batch(
        case=case,
        spec=LayerSpec.from_request(
            case.request,
            scale=case.head_size**-0.5 if case.scale is None else case.scale,
            kv_cache_spec=cache_spec,
        ),
        layer=_layer(case, generator),
        common=_common(case, table),
        query=query,
        key=keys if case.is_cache_free else None,
        value=values if case.is_cache_free else None,
        kv_cache=kv_cache,
    )


def _random(
    generator: torch.Generator, case: Case, rows: int, heads: int, width: int | None = None
) -> Tensor:
    shape = (rows, heads, case.head_size if width is None else width)
    return torch.randn(shape, generator=generator).to(device=case.device, dtype=case.dtype)


def _cache_spec(case: Case) -> AttentionSpec:
    request = case.request
    options = {"layout": case.layout, "fp8_e4m3_dtype": case.fp8_e4m3_dtype}
    spec = spec_for(request, block_size=case.block_size, **options)
    assert isinstance(spec, AttentionSpec)
    if not case.block_padding:
        return spec
    padding = case.block_padding * spec.alignment
    return replace(spec, page_size_padded=spec.page_size_bytes + padding)


def _block_table(case: Case, generator: torch.Generator) -> Tensor:
    """Return a table of shuffled blocks; unused entries name a block of NaN or none at all."""
    used = [-(-length // case.block_size) for length in case.seq_lens]
    order = torch.randperm(sum(used) + 2, generator=generator)
    mine, nobodys = order[2:].tolist(), int(order[0])
    garbage = (nobodys, 2**30, -7)
    width = max(used, default=0) + 2
    table = torch.empty(len(used), width, dtype=torch.int32)
    for index, count in enumerate(used):
        row, mine = mine[:count], mine[count:]
        unused = [garbage[(index + i) % 3] for i in range(width - count)]
        table[index] = torch.tensor(row + unused, dtype=torch.int32)
    return table


def _filled_cache(
    case: Case, spec: AttentionSpec, table: Tensor, keys: Tensor, values: Tensor
) -> Tensor:
    """Return a cache that holds the keys and values; NaN elsewhere but in tails of used blocks."""
    size = case.block_size
    num_blocks = sum(-(-length // size) for length in case.seq_lens) + 2
    kv_cache = spec.allocate(num_blocks, "cpu")
    storage = torch.empty(0, dtype=spec.dtype).set_(kv_cache.untyped_storage())
    _poison(storage)
    views = spec.split(kv_cache)
    slots = []
    for row, length in zip(table.tolist(), case.seq_lens, strict=True):
        positions = range(-(-length // size) * size)
        owned = [row[position // size] * size + position % size for position in positions]
        slots += owned[:length]
        for slot in owned[length:]:
            _fill_slot(views, slot // size, slot % size)
    write_kv(
        kv_cache,
        spec,
        keys.cpu(),
        values.cpu(),
        torch.tensor(slots, dtype=torch.int64),
        k_scale=_host(case.k_scale),
        v_scale=_host(case.v_scale),
    )
    moved = torch.empty(0, dtype=spec.dtype, device=case.device)
    moved = storage.to(moved.device)
    return moved.as_strided(kv_cache.shape, kv_cache.stride())


def _host(scale: float | Tensor) -> float | Tensor:
    return scale.cpu() if isinstance(scale, Tensor) else scale


def _poison(storage: Tensor) -> None:
    """Fill with NaN, or, where a byte cannot be NaN, with bytes that read as NaN in float32."""
    if storage.dtype is torch.int8:
        storage.fill_(-1)
    elif storage.dtype.itemsize == 1:
        nan = 0x80 if storage.dtype is torch.float8_e4m3fnuz else 0x7F
        storage.view(torch.uint8).fill_(nan)
    else:
        storage.fill_(torch.nan)


def _fill_slot(views: KVViews, block: int, offset: int) -> None:
    """Put the largest finite number into a slot that nobody owns yet."""
    for view in (views.key, views.value):
        limit = 127 if view.dtype is torch.int8 else torch.finfo(view.dtype).max
        view[block, offset] = torch.full_like(view[block, offset].float(), limit).to(view.dtype)
    for scale in (views.key_scale, views.value_scale):
        if scale is not None:
            scale[block, offset] = 1e30


def _layer(case: Case, generator: torch.Generator) -> SimpleNamespace:
    sinks = torch.randn(case.num_heads, generator=generator).to(case.device)
    slopes = torch.rand(case.num_heads, generator=generator).to(case.device) + 0.05
    return SimpleNamespace(
        q_scale=1.0,
        k_scale=case.k_scale,
        v_scale=case.v_scale,
        sinks=sinks if case.has_sinks else None,
        alibi_slopes=slopes if case.has_alibi else None,
    )


def _common(case: Case, table: Tensor | None) -> CommonAttentionMetadata:
    options: dict[str, Any] = {"mm_prefix_ranges": case.mm_prefix_ranges}
    seq_lens = list(case.seq_lens)
    if case.attn_type is AttentionType.ENCODER_DECODER:
        lens = torch.tensor(seq_lens, dtype=torch.int32)
        options |= {"encoder_seq_lens": lens.to(case.device), "encoder_seq_lens_cpu": lens}
        seq_lens = [length + 3 for length in case.query_lens]
    if case.is_cache_free and list(case.query_lens) != seq_lens:
        starts = torch.tensor([0, *seq_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        options |= {"key_start_loc": starts.to(case.device), "key_start_loc_cpu": starts}
    if isinstance(case.causal, bool):
        options["causal"] = case.causal and case.attn_type is AttentionType.DECODER
    else:
        flags = torch.tensor(list(case.causal), dtype=torch.bool)
        options |= {"causal": flags.to(case.device), "causal_cpu": flags}
    return CommonAttentionMetadata.from_lengths(
        query_lens=list(case.query_lens),
        seq_lens=seq_lens,
        block_table=table,
        device=case.device,
        **options,
    )
