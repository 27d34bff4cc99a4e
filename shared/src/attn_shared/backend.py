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
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, final

import torch

from attn_shared.ahead import KernelCompiler
from attn_shared.capability import Capability, MultipleOf, Reason
from attn_shared.dtypes import KVCacheLayout
from attn_shared.errors import BackendDefinitionError, UnsupportedOptionError
from attn_shared.impl import (
    AttentionImpl,
    AttentionImplBase,
    AttentionLayer,
    MLAAttentionImpl,
    SparseMLAAttentionImpl,
)
from attn_shared.kernel_paths import KernelPath
from attn_shared.kv_cache import KVCacheSpec, PagedSpec
from attn_shared.limits import BlockSize
from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.request import AttentionRequest, AttentionType
from attn_shared.spec import BuildConfig, LayerSpec

if TYPE_CHECKING:
    from attn_shared.device import DeviceFacts
    from attn_shared.inventory import Inventory, VendorSpec

__all__ = [
    "AttentionBackend",
    "AttentionCGSupport",
    "AttentionImpl",
    "AttentionImplBase",
    "AttentionLayer",
    "AttentionMetadataBuilder",
    "AttentionType",
    "KernelPath",
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


class AttentionBackend(ABC):
    """What a backend is and can do; all of it is asked of the class.

    Class attributes:
        name: unique over all backends of all platforms, upper-case.
        vendor_libraries: names in the inventory of which any one is enough; empty: torch alone.
        vendor_specs: how to find those of them that no platform declares (a third party's own).
        forward_includes_kv_cache_update: `forward` writes the cache itself.
        attn_api: range of interface versions that the class is written for, ">=1,<2".
        auto_priority: where "auto" ranks a third party's backend (see `platform.Candidate`);
            None: it is taken by name only. First-party backends are ranked by their platform.
        description: one line for tables.
    """

    name: ClassVar[str]
    attn_api: ClassVar[str] = ""
    vendor_libraries: ClassVar[tuple[str, ...]] = ()
    vendor_specs: ClassVar[tuple[VendorSpec, ...]] = ()
    forward_includes_kv_cache_update: ClassVar[bool] = False
    auto_priority: ClassVar[int | None] = None
    description: ClassVar[str] = ""

    def __init_subclass__(cls) -> None:
        """Refuse a class that overrides a view of its capability.

        Raises:
            BackendDefinitionError: names the view. Selection reads the capability alone, so that
                the override would say one thing and selection do another.
        """
        super().__init_subclass__()
        for name in cls.__dict__:
            if getattr(AttentionBackend.__dict__.get(name), "__final__", False):
                raise BackendDefinitionError(
                    f"{cls.__name__} overrides {name}, which follows from capability.",
                    hint="return it from capability(), which selection reads.",
                )

    @classmethod
    @abstractmethod
    def capability(cls, device: DeviceFacts, inventory: Inventory) -> Capability:
        """Return what this backend can do on `device` with what is installed.

        Pure: loads nothing, reads no environment. A limit that depends on a library's build, which
        is not known yet, is declared by `Capability.needs_probe`.
        """

    @classmethod
    def kernel_paths(
        cls, request: AttentionRequest, device: DeviceFacts, inventory: Inventory
    ) -> tuple[KernelPath, ...]:
        """Return which of its kernels a request would run on, and why; () where there is one way.

        For people: `attn explain` shows it. It must follow from the functions that choose when the
        layer runs, and is pure as `capability` is.

        Args:
            request: one that the capability serves, with the block size that it would get.
            device: where it would run.
            inventory: what is installed there.
        """
        return ()

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
        """
        return  # torch alone is loaded already; a class with vendor_libraries defines its own

    @classmethod
    def kernel_compiler(cls) -> KernelCompiler | None:
        """Return what compiles ahead the kernels that a library compiles at first use.

        None, the default: there is nothing to compile ahead, or no way to.

        Raises:
            VendorMissingError: the library's compiler cannot be asked, in its own words.
        """
        return None

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
    ) -> tuple[BlockSize, ...]:
        """Return the listed block sizes; a plain number is a divisor, not the one allowed value.

        An `Exactly` is that one value.
        """
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
        if isinstance(spec, PagedSpec):
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

    def shared_block_size(self) -> int:
        """Return tokens per block, for a group whose layers have a cache.

        Raises:
            UnsupportedOptionError: a layer's cache has blocks of another size than the group's.
        """
        group = self.kv_cache_spec
        for name, layer in self.layers.items():
            own = layer.kv_cache_spec
            if group is None or own is None or own.block_size != group.block_size:
                raise UnsupportedOptionError(
                    f"kv_cache_spec={group} does not have the block size of layer {name}: {own}.",
                    hint="layers of one group share one block table.",
                )
        return 0 if group is None else group.block_size

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
