"""TORCH_MLA: multi-head latent attention on torch alone, right for the whole contract anywhere.

Decodes gather a request's latents and attend to them as to one kv head whose value is the latent
part of its key; what scaled_dot_product_attention has no argument for (the LSE) goes through matrix
products in float32 instead: right, but slower, and declared as such.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from attn_shared.backend import AttentionBackend, AttentionLayer, MLAAttentionImpl
from attn_shared.call_checks import CallChecker
from attn_shared.capability import Capability, DeviceLimit, SizeSet, Support
from attn_shared.device import DeviceFacts, Vendor
from attn_shared.dtypes import COMPUTE_DTYPES
from attn_shared.kernel_paths import KernelPath
from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.mla_builder import MLAMetadataBuilder
from attn_shared.mla_metadata import MLAMetadata, MLAQuerySupport
from attn_shared.mla_paths import decode_path
from attn_shared.request import AttentionRequest, AttentionType
from attn_shared.served import require_served
from attn_shared.spec import LayerSpec
from attn_torch._batch import HostBatch
from attn_torch._latents import LatentReader
from attn_torch._paths import CallMaker, kernel_paths_of
from attn_torch._plan import GroupLimits, Plan, Tiler
from attn_torch._visibility import Visibility

if TYPE_CHECKING:
    from attn_shared.inventory import Inventory

__all__ = ["TorchMLABackend", "TorchMLADecode", "TorchMLAImpl", "TorchMLAMetadataBuilder"]

NAME = "TORCH_MLA"
CAPABILITY = Capability(
    devices=tuple(DeviceLimit(vendor=vendor) for vendor in Vendor),
    dtypes=frozenset(COMPUTE_DTYPES.values()),
    head_sizes=SizeSet(),
    kv_cache_dtypes=frozenset(
        {"auto", "float16", "bfloat16", "float32", "fp8", "fp8_e4m3", "fp8_e5m2"}
    ),
    block_sizes=(1,),
    is_mla=True,
    non_causal=Support.YES,
    batch_invariant=Support.YES,
    kv_connector=Support.YES,
    lse=Support.SLOW,
    dcp=Support.SLOW,
    needs_exact_host_lengths=True,
)
_PLAIN = Visibility(window=(None, None), chunk_size=None)


class TorchMLABackend(AttentionBackend):
    """Latent attention over gathered blocks."""

    name = NAME
    attn_api = ">=1,<2"
    description = "torch over gathered latents; every width"

    @classmethod
    def capability(cls, device: DeviceFacts, inventory: Inventory) -> Capability:
        """Return what it can do: the same on every device."""
        return CAPABILITY

    @classmethod
    def kernel_paths(
        cls, request: AttentionRequest, device: DeviceFacts, inventory: Inventory
    ) -> tuple[KernelPath, ...]:
        """Return how decodes are multiplied, with and without an LSE."""
        builder = TorchMLAMetadataBuilder
        return tuple(
            decode_path(builder, way.kernel, way.why, rows=way.rows)
            for way in kernel_paths_of(request, device, "decodes")
        )

    @staticmethod
    def get_impl_cls() -> type[TorchMLAImpl]:
        """Return the class that runs one layer."""
        return TorchMLAImpl

    @staticmethod
    def get_builder_cls() -> type[TorchMLAMetadataBuilder]:
        """Return the class that prepares each step."""
        return TorchMLAMetadataBuilder


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TorchMLADecode:
    """The calls of a step's decodes."""

    plan: Plan


class TorchMLAMetadataBuilder(MLAMetadataBuilder[TorchMLADecode]):
    """Cuts decodes into calls, from exact host lengths."""

    backend_name = NAME
    served = CAPABILITY
    query_support = MLAQuerySupport.VARLEN
    # Up to so many rows the absorbed form multiplies less than expanding every earlier key.
    decode_threshold = 8

    def build_decode(self, common: CommonAttentionMetadata) -> TorchMLADecode:
        """Return the decodes' calls.

        Raises:
            MetadataError: lengths are missing, contradict each other, or exceed the block table.
        """
        batch = HostBatch.of(common, AttentionType.DECODER, self.block_size)
        layer = self.layer
        limits = GroupLimits.of(
            self.device,
            key_bytes=layer.head_size * layer.dtype.itemsize,
            num_heads=layer.num_heads,
            is_invariant=self.is_invariant,
        )
        tiler = Tiler(
            visibility=_PLAIN, limits=limits, device=self.device, block_size=self.block_size
        )
        return TorchMLADecode(plan=tiler.plan(batch, common.block_table))


class TorchMLAImpl(MLAAttentionImpl[MLAMetadata[TorchMLADecode]]):
    """Runs one layer; float32 means IEEE, as in TORCH_SDPA."""

    can_return_lse = True
    decode_type = TorchMLADecode

    def __init__(self, spec: LayerSpec) -> None:
        """Build from the layer's description.

        Raises:
            InvalidRequestError: a value that no backend may accept.
            UnsupportedOptionError: the capability does not serve the layer.
        """
        super().__init__(spec)
        require_served(NAME, CAPABILITY, spec)
        self._checker = CallChecker(spec)
        self._calls = CallMaker(
            spec=spec, visibility=_PLAIN, num_kv_heads=1, needs_exact=spec.scale <= 0
        )

    def forward_mqa(
        self,
        layer: AttentionLayer,
        query: Tensor,
        kv_cache: Tensor,
        metadata: MLAMetadata[TorchMLADecode],
        output: Tensor | None = None,
        *,
        lse: Tensor | None = None,
    ) -> Tensor:
        """Decode; see `MLAAttentionImpl.forward_mqa`.

        Raises:
            InvalidInputError: an argument does not fit the layer or the metadata.
        """
        output, cache = self._checker.check_decode(layer, query, kv_cache, metadata, output, lse)
        self.check_metadata(metadata)
        if metadata.decode is None:
            return output
        reader = LatentReader(
            kv_cache=kv_cache, spec=cache, dtype=self.spec.dtype, scale=layer.k_scale
        )
        self._calls.make(query, output, lse, reader.read).run(metadata.decode.plan)
        return output
