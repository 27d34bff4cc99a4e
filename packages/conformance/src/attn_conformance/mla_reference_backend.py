"""A correct backend for latents that computes by `attn_shared.reference`: slow, on CPUs.

As in `reference_backend`, each thing that a backend decides is a method of its own, so that a
subclass can get one of them wrong and everything else right.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from attn_shared import reference
from attn_shared.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImplBase,
    AttentionLayer,
    AttentionMetadataBuilder,
    MLAAttentionImpl,
)
from attn_shared.call_checks import CallChecker
from attn_shared.capability import Capability, DeviceLimit, MultipleOf, SizeSet, Support
from attn_shared.device import DeviceFacts, Vendor
from attn_shared.dtypes import COMPUTE_DTYPES
from attn_shared.inventory import Inventory
from attn_shared.kv_cache import KVCacheSpec
from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.mla_builder import MLAMetadataBuilder
from attn_shared.mla_metadata import MLAMetadata, MLAQuerySupport, RaggedPart
from attn_shared.mla_prefill import MLAPrefill, prefill_capability
from attn_shared.reference import AttentionOptions, ReferenceResult
from attn_shared.served import require_served
from attn_shared.spec import BuildConfig, LayerSpec

__all__ = [
    "MLA_REFERENCE_CAPABILITY",
    "MLAReferenceBackend",
    "MLAReferenceBuilder",
    "MLAReferenceImpl",
    "MLAReferencePrefill",
]

_CPUS = (DeviceLimit(vendor=Vendor.CPU),)

MLA_REFERENCE_CAPABILITY = Capability(
    devices=_CPUS,
    dtypes=frozenset(COMPUTE_DTYPES.values()),
    head_sizes=SizeSet(),
    kv_cache_dtypes=frozenset({"auto", *COMPUTE_DTYPES, "fp8", "fp8_e4m3", "fp8_e5m2"}),
    block_sizes=(MultipleOf(1),),
    is_mla=True,
    non_causal=Support.YES,
    batch_invariant=Support.YES,
    kv_connector=Support.YES,
    lse=Support.YES,
    dcp=Support.YES,
)


class MLAReferencePrefill(MLAPrefill):
    """Attends in float64 to the keys that come with the call."""

    name = "CONFORMANCE_REFERENCE"
    attn_api = ">=1,<2"

    @classmethod
    def capability(cls, device: DeviceFacts, inventory: Inventory) -> Capability:
        """Everything, on CPUs."""
        served = frozenset(COMPUTE_DTYPES.values())
        return prefill_capability(
            _CPUS, served, batch_invariant=Support.YES, non_causal=Support.YES
        )

    def run(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        part: RaggedPart,
        *,
        output: Tensor | None = None,
        returns_lse: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend, and round once."""
        found = self.attend(query, key, value, part)
        lse = found.lse.float() if returns_lse else None
        return found.output.to(query.dtype), lse

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, part: RaggedPart
    ) -> ReferenceResult:
        """Return the answer in float64."""
        return reference.varlen_attention(
            query,
            key,
            value,
            AttentionOptions(scale=self.spec.scale),
            query_start_loc=part.query_start_loc_cpu,
            key_start_loc=part.key_start_loc_cpu,
            causal=part.is_causal,
        )


class MLAReferenceBuilder(MLAMetadataBuilder[CommonAttentionMetadata]):
    """Keeps the decodes as they are described. `backend` is the class that it stands for."""

    backend_name = "CONFORMANCE_MLA_REFERENCE"
    served = MLA_REFERENCE_CAPABILITY
    query_support = MLAQuerySupport.VARLEN
    decode_threshold = 8
    backend: ClassVar[type[MLAReferenceBackend]]

    def __init__(
        self,
        kv_cache_spec: KVCacheSpec | None,
        layers: Mapping[str, LayerSpec],
        config: BuildConfig,
        device: torch.device,
    ) -> None:
        """Prefill by the reference too: no platform has to be installed."""
        own = replace(config, mla_prefill=self.backend.prefill)
        super().__init__(kv_cache_spec, layers, own, device)

    @classmethod
    def get_cudagraph_support(
        cls, config: BuildConfig, kv_cache_spec: KVCacheSpec | None
    ) -> AttentionCGSupport:
        """Decodes of one length: what `forward_mqa` reads is on the device, or a shape."""
        return AttentionCGSupport.UNIFORM_BATCH

    def build_decode(self, common: CommonAttentionMetadata) -> CommonAttentionMetadata:
        """Return the decodes."""
        return common


class MLAReferenceImpl(MLAAttentionImpl[MLAMetadata[CommonAttentionMetadata]]):
    """Computes in float64. `backend` is the class that it stands for."""

    can_return_lse = True
    decode_type: ClassVar[type[Any]] = CommonAttentionMetadata
    backend: ClassVar[type[MLAReferenceBackend]]

    def __init__(self, spec: LayerSpec) -> None:
        """Refuse a layer that the capability does not serve."""
        super().__init__(spec)
        self.check_spec(spec)
        self.checker = CallChecker(spec)

    def check_spec(self, spec: LayerSpec) -> None:
        """Refuse a layer that is not served."""
        require_served(self.backend.name, self.backend.served, spec)

    def forward_mqa(
        self,
        layer: AttentionLayer,
        query: Tensor,
        kv_cache: Tensor,
        metadata: MLAMetadata[CommonAttentionMetadata],
        output: Tensor | None = None,
        *,
        lse: Tensor | None = None,
    ) -> Tensor:
        """Check, attend, deliver."""
        output = self.check_call(layer, query, kv_cache, metadata, output, lse)
        if metadata.decode is None:
            return output
        found = self.attend(layer, query, kv_cache, metadata.decode)
        self.deliver(found, output, lse)
        return output

    # What a subclass may get wrong

    def check_call(
        self,
        layer: AttentionLayer,
        query: Tensor,
        kv_cache: Tensor,
        metadata: MLAMetadata[CommonAttentionMetadata],
        output: Tensor | None,
        lse: Tensor | None,
    ) -> Tensor:
        """Refuse arguments that do not fit, and return the output."""
        self.check_metadata(metadata)
        return self.checker.check_decode(layer, query, kv_cache, metadata, output, lse)[0]

    def attend(
        self,
        layer: AttentionLayer,
        query: Tensor,
        kv_cache: Tensor,
        common: CommonAttentionMetadata,
    ) -> ReferenceResult:
        """Return the answer in float64."""
        arguments = self.arguments(layer, common)
        return reference.mla_decode(query, kv_cache, **arguments)

    def arguments(self, layer: AttentionLayer, common: CommonAttentionMetadata) -> dict[str, Any]:
        """Return what `reference.mla_decode` is told of a batch."""
        return {
            "scale": self.spec.scale,
            "kv_lora_rank": self.spec.head_size_v,
            "query_start_loc": common.query_start_loc,
            "seq_lens": common.seq_lens,
            "block_table": common.block_table,
            "causal": common.causal,
            "cache_scale": layer.k_scale,
        }

    def deliver(self, found: ReferenceResult, output: Tensor, lse: Tensor | None) -> None:
        """Round the answer and write it in place."""
        rows = slice(0, found.num_tokens)
        output[rows] = found.output[rows].to(output.dtype)
        if lse is not None:
            lse[:, rows] = found.lse[:, rows].to(lse.dtype)


class MLAReferenceBackend(AttentionBackend):
    """The specification of latent attention as a backend.

    Class attributes:
        served: its capability on a CPU.
        impl: its implementation.
        builder: its builder.
        prefill: what prefills.
    """

    name = "CONFORMANCE_MLA_REFERENCE"
    attn_api = ">=1,<2"
    description = "float64 reference of latent attention, for the tests of the conformance suite"
    served: ClassVar[Capability] = MLA_REFERENCE_CAPABILITY
    impl: ClassVar[type[MLAReferenceImpl]] = MLAReferenceImpl
    builder: ClassVar[type[MLAReferenceBuilder]] = MLAReferenceBuilder
    prefill: ClassVar[type[MLAPrefill]] = MLAReferencePrefill

    def __init_subclass__(cls) -> None:
        """Give the subclass an implementation and a builder that know it."""
        super().__init_subclass__()
        cls.impl = type(cls.impl.__name__, (cls.impl,), {"backend": cls})
        own = {"backend": cls, "served": cls.served}
        cls.builder = type(cls.builder.__name__, (cls.builder,), own)

    @classmethod
    def capability(cls, device: DeviceFacts, inventory: Inventory) -> Capability:
        """Return `served`, whatever the device."""
        return cls.served

    @classmethod
    def get_impl_cls(cls) -> type[AttentionImplBase[Any]]:
        """Return `impl`."""
        return cls.impl

    @classmethod
    def get_builder_cls(cls) -> type[AttentionMetadataBuilder[Any]]:
        """Return `builder`."""
        return cls.builder


MLAReferenceImpl.backend = MLAReferenceBackend
MLAReferenceBuilder.backend = MLAReferenceBackend
