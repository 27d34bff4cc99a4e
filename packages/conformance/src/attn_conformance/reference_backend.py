"""A correct backend that computes by `attn_shared.reference`: every feature, slow, on CPUs.

Each thing that a backend decides is a method of its own, so that a subclass can get one of them
wrong and everything else right. Register a subclass by its path: "module:Class".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from attn_shared import reference
from attn_shared.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionImplBase,
    AttentionLayer,
    AttentionMetadataBuilder,
)
from attn_shared.call_checks import CallChecker
from attn_shared.capability import (
    Capability,
    DeviceLimit,
    MultipleOf,
    Reason,
    Rule,
    SizeSet,
    Support,
)
from attn_shared.device import DeviceFacts, Vendor
from attn_shared.dtypes import COMPUTE_DTYPES, KVCacheLayout
from attn_shared.errors import InvalidInputError
from attn_shared.inventory import Inventory
from attn_shared.kv_cache import AttentionSpec, KVCacheSpec, KVViews
from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.reference import AttentionOptions, ReferenceResult
from attn_shared.request import AttentionRequest, AttentionType
from attn_shared.served import require_batch_served, require_served
from attn_shared.spec import BuildConfig, LayerSpec, require_uniform

__all__ = [
    "REFERENCE_CAPABILITY",
    "ReferenceBackend",
    "ReferenceBuilder",
    "ReferenceCall",
    "ReferenceImpl",
    "ReferenceMetadata",
]


def _chunks_are_causal(request: AttentionRequest, device: DeviceFacts) -> Reason | None:
    """A chunk is seen up to the query itself: it has no rule for other rows."""
    if request.chunk_size is None:
        return None
    if request.is_causal and not request.use_mm_prefix:
        return None
    return Reason(
        code="chunked_local", value=str(request.chunk_size), allowed="None unless all is causal"
    )


REFERENCE_CAPABILITY = Capability(
    devices=(DeviceLimit(vendor=Vendor.CPU),),
    dtypes=frozenset(COMPUTE_DTYPES.values()),
    head_sizes=SizeSet(),
    head_sizes_v=SizeSet(),
    kv_cache_dtypes=frozenset(
        {"auto", *COMPUTE_DTYPES, "fp8", "fp8_e4m3", "fp8_e5m2", "int8_per_token_head"}
    ),
    block_sizes=(MultipleOf(1),),
    attn_types=frozenset(AttentionType),
    kv_layouts=(KVCacheLayout.NHD, KVCacheLayout.HND),
    sinks=Support.YES,
    window=Support.YES,
    two_sided_window=Support.YES,
    chunked_local=Support.YES,
    softcap=Support.YES,
    alibi=Support.YES,
    non_causal=Support.YES,
    per_request_causal=Support.YES,
    mm_prefix=Support.YES,
    batch_invariant=Support.YES,
    kv_connector=Support.YES,
    per_head_quant_scales=Support.YES,
    lse=Support.YES,
    dcp=Support.YES,
    pcp=Support.YES,
    tolerates_nan_tail=True,
    rules=(Rule(name="chunks_are_causal", check=_chunks_are_causal),),
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReferenceMetadata:
    """One step: the batch as it was described, and the prefix that was said to be shared."""

    common: CommonAttentionMetadata
    common_prefix_len: int = 0


class ReferenceBuilder(AttentionMetadataBuilder[ReferenceMetadata]):
    """Keeps the batch. `backend` is the class whose capability it stands for."""

    supports_update_block_table = True
    backend: ClassVar[type[ReferenceBackend]]

    def __init__(
        self,
        kv_cache_spec: KVCacheSpec | None,
        layers: Mapping[str, LayerSpec],
        config: BuildConfig,
        device: torch.device,
    ) -> None:
        """Refuse layers that differ in what decides who sees whom."""
        super().__init__(kv_cache_spec, layers, config, device)
        self.layer = require_uniform(layers, ("attn_type", "window", "chunk_size"))

    @classmethod
    def get_cudagraph_support(
        cls, config: BuildConfig, kv_cache_spec: KVCacheSpec | None
    ) -> AttentionCGSupport:
        """Every batch: what `forward` reads is on the device, or a shape."""
        return AttentionCGSupport.ALWAYS

    def build(
        self, common_prefix_len: int, common: CommonAttentionMetadata, fast_build: bool = False
    ) -> ReferenceMetadata:
        """Refuse what is not served, and keep the rest."""
        self.check(common_prefix_len, common)
        return ReferenceMetadata(common=common, common_prefix_len=common_prefix_len)

    def check(self, common_prefix_len: int, common: CommonAttentionMetadata) -> None:
        """Refuse a batch that is not served, and a prefix that nobody may treat as shared."""
        name, served = self.backend.name, self.backend.served
        require_batch_served(name, served, self.layer, common, common_prefix_len)

    def update_block_table(
        self, metadata: ReferenceMetadata, block_table: Tensor, slot_mapping: Tensor
    ) -> ReferenceMetadata:
        """Return the same batch over another table."""
        common = metadata.common.with_fields(block_table=block_table, slot_mapping=slot_mapping)
        return ReferenceMetadata(common=common, common_prefix_len=metadata.common_prefix_len)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReferenceCall:
    """One call of `forward`: all that it was handed."""

    layer: AttentionLayer
    query: Tensor
    key: Tensor | None
    value: Tensor | None
    kv_cache: Tensor | None
    metadata: ReferenceMetadata

    @property
    def common(self) -> CommonAttentionMetadata:
        """The batch."""
        return self.metadata.common


class ReferenceImpl(AttentionImpl[ReferenceMetadata]):
    """Computes in float64. `backend` is the class whose capability it stands for."""

    can_return_lse = True
    supports_pcp = True
    backend: ClassVar[type[ReferenceBackend]]

    def __init__(self, spec: LayerSpec) -> None:
        """Refuse a layer that the capability does not serve."""
        super().__init__(spec)
        self.check_layer(spec)
        self.checker = CallChecker(spec)

    def forward(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor | None,
        metadata: ReferenceMetadata,
        output: Tensor | None = None,
        *,
        lse: Tensor | None = None,
    ) -> Tensor:
        """Check, attend, deliver."""
        call = ReferenceCall(
            layer=layer, query=query, key=key, value=value, kv_cache=kv_cache, metadata=metadata
        )
        self.check_metadata(metadata)
        self.check_call(call, output, lse)
        return self.deliver(call, self.attend(call), output, lse)

    # What a subclass may get wrong

    def check_metadata(self, metadata: ReferenceMetadata) -> None:
        """Refuse another backend's metadata."""
        if not isinstance(metadata, ReferenceMetadata):
            raise InvalidInputError.for_argument(
                "metadata", f"a {type(metadata).__name__}", "a ReferenceMetadata"
            )

    def check_layer(self, spec: LayerSpec) -> None:
        """Refuse a layer that is not served."""
        require_served(self.backend.name, self.backend.served, spec)

    def check_call(self, call: ReferenceCall, output: Tensor | None, lse: Tensor | None) -> None:
        """Refuse tensors that do not fit the layer."""
        checker, common = self.checker, call.common
        device = common.query_start_loc.device
        checker.check_tensors(call.query, output, lse, common.num_actual_tokens, device)
        checker.check_layer(call.layer, device)
        if self.spec.attn_type in (AttentionType.ENCODER, AttentionType.ENCODER_ONLY):
            starts = common.key_start_loc_cpu
            starts = common.query_start_loc_cpu if starts is None else starts
            checker.check_keys(call.key, call.value, call.kv_cache, device, int(starts[-1]))
        else:
            kv_cache, cache_spec = checker.check_cache(call.kv_cache, device)
            cache_spec.check(kv_cache)
            checker.check_written_keys(call.key, call.value, device)

    def attend(self, call: ReferenceCall) -> ReferenceResult:
        """Return the answer in float64: from the cache, or from the keys of the call."""
        if self.spec.attn_type in (AttentionType.ENCODER, AttentionType.ENCODER_ONLY):
            return self.attend_ragged(call)
        return self.attend_paged(call)

    def attend_paged(self, call: ReferenceCall) -> ReferenceResult:
        """Read the cache."""
        views = self.views(call)
        return reference.paged_attention(
            call.query, views.key, views.value, self.options(call), **self.paged_arguments(call)
        )

    def attend_ragged(self, call: ReferenceCall) -> ReferenceResult:
        """Read the call's own keys and values."""
        common = call.common
        if call.key is None or call.value is None:
            raise TypeError("checked before")
        starts = common.query_start_loc
        return reference.varlen_attention(
            call.query,
            call.key,
            call.value,
            self.options(call),
            query_start_loc=starts,
            key_start_loc=starts if common.key_start_loc is None else common.key_start_loc,
            causal=False,
        )

    def options(self, call: ReferenceCall) -> AttentionOptions:
        """Return what the layer asks beside its tensors."""
        return AttentionOptions(
            scale=self.spec.scale,
            window=self.spec.window,
            softcap=self.spec.softcap,
            alibi_slopes=call.layer.alibi_slopes,
            sinks=call.layer.sinks,
            chunk_size=self.spec.chunk_size,
        )

    def views(self, call: ReferenceCall) -> KVViews:
        """Return keys and values (and their scales) of the cache."""
        if call.kv_cache is None or not isinstance(self.spec.kv_cache_spec, AttentionSpec):
            raise TypeError("checked before")
        return self.spec.kv_cache_spec.split(call.kv_cache)

    def paged_arguments(self, call: ReferenceCall) -> dict[str, Any]:
        """Return the arguments of `reference.paged_attention` that describe the batch."""
        common, views = call.common, self.views(call)
        is_cross = self.spec.attn_type is AttentionType.ENCODER_DECODER
        return {
            "query_start_loc": common.query_start_loc,
            "seq_lens": common.encoder_seq_lens if is_cross else common.seq_lens,
            "block_table": common.block_table,
            "causal": False if is_cross else common.causal,
            "mm_prefix_ranges": common.mm_prefix_ranges,
            "k_scale": call.layer.k_scale,
            "v_scale": call.layer.v_scale,
            "key_scales": views.key_scale,
            "value_scales": views.value_scale,
        }

    def deliver(
        self,
        call: ReferenceCall,
        result: ReferenceResult,
        output: Tensor | None,
        lse: Tensor | None,
    ) -> Tensor:
        """Round the answer and write it in place; rows of padding are left alone."""
        rows = slice(0, result.num_tokens)
        if output is None:
            output = torch.zeros_like(result.output, dtype=call.query.dtype)
        output[rows] = result.output[rows].to(output.dtype)
        if lse is not None:
            lse[:, rows] = result.lse[:, rows].to(lse.dtype)
        return output


class ReferenceBackend(AttentionBackend):
    """The specification as a backend.

    Class attributes:
        served: its capability on a CPU.
        impl: its implementation.
        builder: its builder.
    """

    name = "CONFORMANCE_REFERENCE"
    attn_api = ">=1,<2"
    description = "float64 reference, for the tests of the conformance suite"
    served: ClassVar[Capability] = REFERENCE_CAPABILITY
    impl: ClassVar[type[ReferenceImpl]] = ReferenceImpl
    builder: ClassVar[type[ReferenceBuilder]] = ReferenceBuilder

    def __init_subclass__(cls) -> None:
        """Give the subclass an implementation and a builder that know it."""
        super().__init_subclass__()
        cls.impl = type(cls.impl.__name__, (cls.impl,), {"backend": cls})
        cls.builder = type(cls.builder.__name__, (cls.builder,), {"backend": cls})

    @classmethod
    def capability(cls, device: DeviceFacts, inventory: Inventory) -> Capability:
        """Return `served`, whatever the device: a limit of devices is part of it."""
        return cls.served

    @classmethod
    def get_impl_cls(cls) -> type[AttentionImplBase[Any]]:
        """Return `impl`."""
        return cls.impl

    @classmethod
    def get_builder_cls(cls) -> type[AttentionMetadataBuilder[Any]]:
        """Return `builder`."""
        return cls.builder


ReferenceImpl.backend = ReferenceBackend
ReferenceBuilder.backend = ReferenceBackend
