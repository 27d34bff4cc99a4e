"""The abstract classes that a backend implements.

A backend is one class (never instantiated) that says what it is, with a metadata builder, which
turns a batch into what its kernels need once per step, and an implementation, which runs one
layer. Calls, in order:

    impl = backend.get_impl_cls()(layer_spec)                       once per layer
    builder = backend.get_builder_cls()(spec, layers, config, dev)  once per group of layers
    metadata = builder.build(common_prefix_len, common)             once per step, on the host
    impl.do_kv_cache_update(layer, key, value, kv_cache, slots)     per layer and step
    impl.forward(layer, query, key, value, kv_cache, metadata, output)   on the device
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NoReturn, Protocol, TypeVar, final

import torch

from attn_shared.capability import Capability, MultipleOf, Reason
from attn_shared.dtypes import KVCacheLayout
from attn_shared.errors import MLAForwardError, PluginError, UnsupportedOptionError
from attn_shared.kv_cache import AttentionSpec, KVCacheSpec, MLAAttentionSpec
from attn_shared.kv_write import concat_and_cache_mla, write_kv
from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.request import AttentionRequest, AttentionType
from attn_shared.spec import BuildConfig, LayerSpec

if TYPE_CHECKING:
    from attn_shared.device import DeviceFacts
    from attn_shared.inventory import Inventory

__all__ = [
    "AttentionBackend",
    "AttentionCGSupport",
    "AttentionImpl",
    "AttentionImplBase",
    "AttentionLayer",
    "AttentionMetadataBuilder",
    "AttentionType",
    "MLAAttentionImpl",
    "MultipleOf",
    "SparseMLAAttentionImpl",
]

M = TypeVar("M")
"""A backend's own per-step metadata."""


class AttentionCGSupport(IntEnum):
    """Which batches of a backend may be captured in a graph; the higher, the more."""

    NEVER = 0
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    UNIFORM_BATCH = 2
    """All queries of the batch have one length."""
    ALWAYS = 3


class AttentionLayer(Protocol):
    """What an implementation reads of the layer that calls it.

    Attributes:
        q_scale, k_scale, v_scale: read back = stored * scale; a number or float32 (Hkv,).
        sinks: (Hq,) float32, or None.
        alibi_slopes: (Hq,) float32, or None.
    """

    q_scale: float | torch.Tensor
    k_scale: float | torch.Tensor
    v_scale: float | torch.Tensor
    sinks: torch.Tensor | None
    alibi_slopes: torch.Tensor | None


class AttentionBackend(ABC):
    """What a backend is and can do; all of it is asked of the class.

    Class attributes:
        name: unique over all backends of all platforms, upper-case.
        vendor_libraries: names in the inventory of which any one is enough; empty: torch alone.
        forward_includes_kv_cache_update: `forward` writes the cache itself.
        attn_api: range of interface versions that the class is written for, ">=1,<2".
        auto_priority: where "auto" ranks a third party's backend (see `platform.Candidate`);
            None: it is taken by name only. First-party backends are ranked by their platform.
        description: one line for tables.
    """

    name: ClassVar[str]
    attn_api: ClassVar[str] = ""
    vendor_libraries: ClassVar[tuple[str, ...]] = ()
    forward_includes_kv_cache_update: ClassVar[bool] = False
    auto_priority: ClassVar[int | None] = None
    description: ClassVar[str] = ""

    @classmethod
    @abstractmethod
    def capability(cls, device: DeviceFacts, inventory: Inventory) -> Capability:
        """Return what this backend can do on `device` with what is installed.

        Pure: loads nothing, reads no environment. A limit that depends on a library's build, which
        is not known yet, is declared by `Capability.needs_probe`.
        """

    @staticmethod
    @abstractmethod
    def get_impl_cls() -> type[AttentionImplBase[Any]]:
        """Return the class that runs one layer."""

    @staticmethod
    @abstractmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder[Any]]:
        """Return the class that prepares each step."""

    @classmethod
    def load_vendor(cls, device: DeviceFacts, inventory: Inventory) -> None:
        """Import what the kernels need, before the first layer is built.

        Raises:
            VendorMissingError: with the library's own words.
            PluginError: the class names libraries and does not say how to load them.
        """
        if cls.vendor_libraries:
            raise PluginError(
                f"backend {cls.name} needs one of {', '.join(cls.vendor_libraries)} and defines no "
                "load_vendor."
            )

    # Views of the capability under the field's names; final, so that they cannot disagree.

    @final
    @classmethod
    def get_name(cls) -> str:
        """Return the backend's name."""
        return cls.name

    @final
    @classmethod
    def full_cls_name(cls) -> tuple[str, str]:
        """Return (module, qualified name) of the class."""
        return (cls.__module__, cls.__qualname__)

    @final
    @classmethod
    def is_mla(cls, device: DeviceFacts, inventory: Inventory) -> bool:
        """Whether its cache holds latents."""
        return cls.capability(device, inventory).is_mla

    @final
    @classmethod
    def supports_head_size(cls, head_size: int, device: DeviceFacts, inventory: Inventory) -> bool:
        """Whether query and key heads of this width are served."""
        return head_size in cls.capability(device, inventory).head_sizes

    @final
    @classmethod
    def supports_dtype(cls, dtype: torch.dtype, device: DeviceFacts, inventory: Inventory) -> bool:
        """Whether this compute dtype is served."""
        return dtype in cls.capability(device, inventory).dtypes

    @final
    @classmethod
    def supports_kv_cache_dtype(
        cls, kv_cache_dtype: str, device: DeviceFacts, inventory: Inventory
    ) -> bool:
        """Whether a cache of this format is served."""
        return kv_cache_dtype in cls.capability(device, inventory).kv_cache_dtypes

    @final
    @classmethod
    def supports_block_size(
        cls, block_size: int, device: DeviceFacts, inventory: Inventory
    ) -> bool:
        """Whether blocks of this many tokens are served."""
        return cls.capability(device, inventory).accepts_block_size(block_size)

    @final
    @classmethod
    def supports_attn_type(
        cls, attn_type: AttentionType, device: DeviceFacts, inventory: Inventory
    ) -> bool:
        """Whether this kind of attention is served."""
        return attn_type in cls.capability(device, inventory).attn_types

    @final
    @classmethod
    def get_supported_kernel_block_sizes(
        cls, device: DeviceFacts, inventory: Inventory
    ) -> tuple[int | MultipleOf, ...]:
        """Return the listed block sizes; a plain number is a divisor, not the one allowed value."""
        return cls.capability(device, inventory).block_sizes

    @final
    @classmethod
    def get_preferred_block_size(
        cls, device: DeviceFacts, inventory: Inventory, default: int | None = None
    ) -> int:
        """Return `default` where it is served, else the preferred block size."""
        return cls.capability(device, inventory).block_size_for(default)

    @final
    @classmethod
    def get_required_kv_cache_layout(
        cls, device: DeviceFacts, inventory: Inventory
    ) -> KVCacheLayout | None:
        """Return the one layout that is served, or None where the caller may choose."""
        layouts = cls.capability(device, inventory).kv_layouts
        return layouts[0] if len(layouts) == 1 else None

    @final
    @classmethod
    def validate_configuration(
        cls, request: AttentionRequest, device: DeviceFacts, inventory: Inventory
    ) -> tuple[Reason, ...]:
        """Return every reason to refuse; empty means the request is served."""
        return cls.capability(device, inventory).check(request, device)

    @final
    @classmethod
    def get_kv_cache_shape(cls, spec: KVCacheSpec, num_blocks: int) -> tuple[int, ...]:
        """Return the logical shape of a cache; its strides are `spec.strides`."""
        if isinstance(spec, AttentionSpec | MLAAttentionSpec):
            return spec.shape(num_blocks)
        raise UnsupportedOptionError(f"{type(spec).__name__} has no paged cache of one shape.")


class AttentionMetadataBuilder(ABC, Generic[M]):
    """Turns a batch into what the kernels of one group of layers need, once per step.

    Class attributes:
        supports_update_block_table: `update_block_table` is cheaper than `build`.
        requires_ordered_batch: `build` refuses batches whose decodes do not come first.
    """

    supports_update_block_table: ClassVar[bool] = False
    requires_ordered_batch: ClassVar[bool] = False

    def __init__(
        self,
        kv_cache_spec: KVCacheSpec | None,
        layers: Mapping[str, LayerSpec],
        config: BuildConfig,
        device: torch.device,
    ) -> None:
        """Keep what every step needs; refuse layers that cannot share one plan.

        Args:
            kv_cache_spec: the group's cache; None for cache-free attention.
            layers: layer name -> its description.
            config: bounds of the batches.
            device: where the kernels run.
        """
        self.kv_cache_spec = kv_cache_spec
        self.layers = dict(layers)
        self.config = config
        self.device = device
        self.reorder_batch_threshold: int | None = None

    @classmethod
    def get_cudagraph_support(
        cls, config: BuildConfig, kv_cache_spec: KVCacheSpec | None
    ) -> AttentionCGSupport:
        """Return which batches may be captured; undeclared is NEVER."""
        return AttentionCGSupport.NEVER

    @abstractmethod
    def build(
        self, common_prefix_len: int, common: CommonAttentionMetadata, fast_build: bool = False
    ) -> M:
        """Return the step's metadata.

        Args:
            common_prefix_len: tokens that all requests share as leading whole blocks; > 0 means
                that cascade attention was chosen.
            common: the batch.
            fast_build: prefer little host time over a better schedule.
        """

    def update_block_table(
        self, metadata: M, block_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> M:
        """Return metadata of the same batch over another block table.

        Raises:
            UnsupportedOptionError: the builder does not declare it.
        """
        raise UnsupportedOptionError(
            f"{type(self).__name__} has no update_block_table.",
            hint="ask supports_update_block_table first, and build again otherwise.",
        )

    def build_for_cudagraph_capture(self, common: CommonAttentionMetadata) -> M:
        """Return metadata to capture with; its data pointers stay valid for every replay."""
        return self.build(0, common)

    def build_for_drafting(self, common: CommonAttentionMetadata, draft_index: int) -> M:
        """Return metadata for one draft step of speculative decoding."""
        return self.build(0, common, fast_build=True)

    def use_cascade_attention(
        self, common_prefix_len: int, query_lens: Sequence[int], num_compute_units: int
    ) -> bool:
        """Whether running the shared prefix once is expected to pay."""
        return False


class AttentionImplBase(ABC, Generic[M]):
    """Runs one layer.

    Class attributes:
        can_return_lse: the `lse` argument is served.
        lse_base_on_e: the returned LSE is a natural logarithm (False: log2).
        supports_pcp: prefill may be sharded over ranks.
    """

    can_return_lse: ClassVar[bool] = False
    lse_base_on_e: ClassVar[bool] = True
    supports_pcp: ClassVar[bool] = False

    def __init__(self, spec: LayerSpec) -> None:
        """Build from the layer's description alone."""
        self.spec = spec


class AttentionImpl(AttentionImplBase[M]):
    """Runs one layer of ordinary attention."""

    @abstractmethod
    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor | None,
        metadata: M,
        output: torch.Tensor | None = None,
        *,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend, and return the output.

        Never synchronises, and never branches on the value of a tensor.

        Args:
            layer: the calling layer: scales, sinks, slopes.
            query: (T, Hq, D); rows past query_start_loc[-1] are not read.
            key: (T, Hkv, D), this step's keys, or None where only the cache is read.
            value: (T, Hkv, Dv), or None.
            kv_cache: the layer's cache, None for cache-free attention.
            metadata: what the builder returned for this step.
            output: (T, Hq, Dv), written in place and returned; None returns the kernel's own.
            lse: (Hq, T) float32, written in place: natural logarithm of the denominator that the
                output was divided by.
        """

    def do_kv_cache_update(
        self,
        layer: AttentionLayer,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write the step's keys and values into their slots; -1 is not written."""
        spec = self.spec.kv_cache_spec
        if not isinstance(spec, AttentionSpec):
            raise UnsupportedOptionError("this layer has no paged cache to write.")
        write_kv(
            kv_cache,
            spec,
            key,
            value,
            slot_mapping,
            k_scale=layer.k_scale,
            v_scale=layer.v_scale,
        )


class MLAAttentionImpl(AttentionImplBase[M]):
    """Runs one layer of multi-head latent attention: there is no `forward`."""

    @abstractmethod
    def forward_mha(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        latent: torch.Tensor,
        rope: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: M,
        output: torch.Tensor,
    ) -> None:
        """Prefill with expanded heads.

        Args:
            layer: the calling layer.
            query: (T, H, qk_nope_head_dim + qk_rope_head_dim).
            latent: (T, kv_lora_rank), this step's.
            rope: (T, qk_rope_head_dim), this step's.
            kv_cache: (num_blocks, block_size, kv_lora_rank + qk_rope_head_dim).
            metadata: this step's.
            output: (T, H, v_head_dim), written in place.
        """

    @abstractmethod
    def forward_mqa(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: M,
        output: torch.Tensor | None = None,
        *,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Decode over the latent cache.

        Args:
            layer: the calling layer.
            query: (T, H, kv_lora_rank + qk_rope_head_dim), absorbed.
            kv_cache: (num_blocks, block_size, kv_lora_rank + qk_rope_head_dim).
            metadata: this step's.
            output: (T, H, kv_lora_rank), written in place and returned.
            lse: (H, T) float32, natural logarithm, written in place.
        """

    def do_kv_cache_update(
        self,
        layer: AttentionLayer,
        latent: torch.Tensor,
        rope: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write the step's latents (T, kv_lora_rank) and rope parts into their slots.

        `layer.k_scale` is the one scale of a quantised entry.
        """
        spec = self.spec.kv_cache_spec
        if not isinstance(spec, MLAAttentionSpec):
            raise UnsupportedOptionError("this layer has no latent cache to write.")
        concat_and_cache_mla(kv_cache, spec, latent, rope, slot_mapping, scale=layer.k_scale)

    @final
    @property
    def forward(self) -> NoReturn:
        """Refuse: MLA has two calls, not one.

        Raises:
            MLAForwardError: always (an AttributeError, so that hasattr answers False).
        """
        raise MLAForwardError(
            f"{type(self).__name__} has no forward: multi-head latent attention runs prefill and "
            "decode by different products.",
            hint="call forward_mha for prefill and forward_mqa for decode.",
        )


class SparseMLAAttentionImpl(MLAAttentionImpl[M]):
    """MLA over the keys that an indexer selected; decode-shaped calls only."""

    @abstractmethod
    def forward_mqa(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: M,
        output: torch.Tensor | None = None,
        *,
        topk_indices: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend to `topk_indices` (T, topk) int32 slots, -1 where there is none."""

    def forward_mha(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        latent: torch.Tensor,
        rope: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: M,
        output: torch.Tensor,
    ) -> None:
        """Refuse: a sparse backend prefills through forward_mqa as well.

        Raises:
            MLAForwardError: always.
        """
        raise MLAForwardError(
            f"{type(self).__name__} has no forward_mha.",
            hint="call forward_mqa with topk_indices for every phase.",
        )
