"""CPU_MLA: latent attention by the kernels of CPU_ATTN, every latent read once for all heads.

In latent space all heads of a token share one key, whose leading columns are its value: to the
kernels that is one kv head with as many rows as there are heads, values a view of the keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from attn_cpu._attn_batch import HostBatch
from attn_cpu._calls import LIBRARY, Keys, attend, load_kernels
from attn_cpu._paths import kernel_paths_of
from attn_cpu._plans import NO_LIMITS, Heads, Plan, partition
from attn_cpu._scales import ScaleTensors
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
from attn_shared.workspace import Workspace

if TYPE_CHECKING:
    from attn_shared.inventory import Inventory

__all__ = ["CpuMLABackend", "CpuMLADecode", "CpuMLAImpl", "CpuMLAMetadataBuilder"]

NAME = "CPU_MLA"
_WIDTHS = SizeSet(minimum=32, maximum=576, multiple_of=8)
CAPABILITY = Capability(
    devices=(DeviceLimit(vendor=Vendor.CPU),),
    dtypes=frozenset(COMPUTE_DTYPES.values()),
    head_sizes=_WIDTHS,
    head_sizes_v=_WIDTHS,
    kv_cache_dtypes=frozenset({"auto", "fp8", "fp8_e4m3", "fp8_e5m2"}),
    block_sizes=(1,),
    preferred_block_size=128,
    is_mla=True,
    non_causal=Support.YES,
    batch_invariant=Support.YES,
    kv_connector=Support.YES,
    lse=Support.YES,
    dcp=Support.YES,
)


class CpuMLABackend(AttentionBackend):
    """Latent attention where the latents are stored."""

    name = NAME
    attn_api = ">=1,<2"
    description = "native C++ for AVX2, AVX-512 and AMX over latents"
    vendor_libraries = (LIBRARY,)

    @classmethod
    def capability(cls, device: DeviceFacts, inventory: Inventory) -> Capability:
        """Return what it can do: the same on every CPU."""
        return CAPABILITY

    @classmethod
    def kernel_paths(
        cls, request: AttentionRequest, device: DeviceFacts, inventory: Inventory
    ) -> tuple[KernelPath, ...]:
        """Return the level of instructions that decodes."""
        builder = CpuMLAMetadataBuilder
        levels = kernel_paths_of(request, device, inventory)
        return tuple(decode_path(builder, path.kernel, path.why) for path in levels)

    @staticmethod
    def get_impl_cls() -> type[CpuMLAImpl]:
        """Return the class that runs one layer."""
        return CpuMLAImpl

    @staticmethod
    def get_builder_cls() -> type[CpuMLAMetadataBuilder]:
        """Return the class that prepares each step."""
        return CpuMLAMetadataBuilder

    @classmethod
    def load_vendor(cls, device: DeviceFacts, inventory: Inventory) -> None:
        """Load the library.

        Raises:
            VendorMissingError: it does not load; in its own words.
        """
        load_kernels(NAME, inventory)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CpuMLADecode:
    """The decodes of a step, and their partition for the threads."""

    batch: HostBatch
    plan: Plan


class CpuMLAMetadataBuilder(MLAMetadataBuilder[CpuMLADecode]):
    """Plans the decodes for torch's present number of threads."""

    backend_name = NAME
    served = CAPABILITY
    query_support = MLAQuerySupport.VARLEN
    # Up to so many rows the absorbed form multiplies less than expanding every earlier key.
    decode_threshold = 8

    def build_decode(self, common: CommonAttentionMetadata) -> CpuMLADecode:
        """Return the decodes' plan.

        Raises:
            MetadataError: lengths contradict each other, or exceed the block table.
        """
        layer = self.layer
        batch = HostBatch.of(common, AttentionType.DECODER, self.block_size)
        heads = Heads(layer.num_heads, 1, layer.head_size, layer.head_size_v)
        workspace = self.config.workspace or Workspace(self.device)
        plan = partition(batch, heads, NO_LIMITS, workspace, is_invariant=self.is_invariant)
        return CpuMLADecode(batch=batch, plan=plan)


class CpuMLAImpl(MLAAttentionImpl[MLAMetadata[CpuMLADecode]]):
    """Runs one layer."""

    can_return_lse = True
    decode_type = CpuMLADecode

    def __init__(self, spec: LayerSpec) -> None:
        """Build from the layer's description.

        Raises:
            InvalidRequestError: a value that no backend may accept.
            UnsupportedOptionError: the capability does not serve the layer.
        """
        super().__init__(spec)
        require_served(NAME, CAPABILITY, spec)
        self._checker = CallChecker(spec)
        self._scales = ScaleTensors()

    def forward_mqa(
        self,
        layer: AttentionLayer,
        query: Tensor,
        kv_cache: Tensor,
        metadata: MLAMetadata[CpuMLADecode],
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
        decode = metadata.decode
        if decode is None:
            return output
        views = cache.split(kv_cache)
        scale = self._scales.of(layer.k_scale) if cache.is_quantized else None
        count = metadata.num_decode_tokens
        attend(
            query[:count],
            output[:count],
            None if lse is None else lse[:, :count],
            Keys(views.key, views.value, scale, scale),
            decode.batch,
            decode.plan,
            (self.spec.scale, None, None, None, None),
        )
        return output
