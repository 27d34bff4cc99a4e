"""TORCH_SDPA: paged attention on torch alone, right for the whole contract on any device.

Blocks are gathered into dense keys and values, which scaled_dot_product_attention reads. What it
has no argument for (LSE, sinks, softcap, ALiBi) goes through matrix products in float32 instead:
right, but slower, and declared as such.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attn_shared.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionLayer,
    AttentionMetadataBuilder,
)
from attn_shared.capability import Capability, DeviceLimit, Reason, Rule, SizeSet, Support
from attn_shared.cascade import check_cascade
from attn_shared.device import DeviceFacts, Vendor
from attn_shared.dtypes import COMPUTE_DTYPES, KVCacheLayout
from attn_shared.errors import InvalidInputError, MetadataError, UnsupportedOptionError
from attn_shared.kv_cache import KVCacheSpec
from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.request import AttentionRequest, AttentionType
from attn_shared.spec import BuildConfig, LayerSpec, require_uniform
from attn_shared.workspace import Workspace
from attn_torch._batch import CACHE_FREE, HostBatch
from attn_torch._cache_reader import CacheReader, CallReader, KeysValues
from attn_torch._checks import CallChecker
from attn_torch._exact import ExactOptions
from attn_torch._fused import is_fused
from attn_torch._layers import require_served
from attn_torch._plan import GroupLimits, GroupTile, Plan, RequestTile, Tiler
from attn_torch._precision import accumulator_dtype
from attn_torch._runner import LayerCall
from attn_torch._visibility import Visibility

if TYPE_CHECKING:
    from attn_shared.inventory import Inventory

__all__ = [
    "TorchSDPABackend",
    "TorchSDPAImpl",
    "TorchSDPAMetadata",
    "TorchSDPAMetadataBuilder",
]

_NAME = "TORCH_SDPA"


def _chunks_are_causal(request: AttentionRequest, _device: DeviceFacts) -> Reason | None:
    """A chunk is seen up to the query itself, which only causal rows of a decoder have."""
    is_causal = not (request.non_causal or request.per_request_causal)
    if request.chunk_size is None or (is_causal and request.attn_type is AttentionType.DECODER):
        return None
    return Reason(
        code="chunked_local_causal",
        value=f"chunk_size={request.chunk_size}, attn_type={request.attn_type}",
        allowed="causal decoder rows with chunk_size",
    )


def _ranges_are_of_decoders(request: AttentionRequest, _device: DeviceFacts) -> Reason | None:
    """Multimodal ranges widen a causal mask, which encoders and cross-attention do not have."""
    if not request.use_mm_prefix or request.attn_type is AttentionType.DECODER:
        return None
    return Reason(
        code="mm_prefix_decoder", value=str(request.attn_type), allowed="decoder with mm_prefix"
    )


_CAPABILITY = Capability(
    devices=tuple(DeviceLimit(vendor=vendor) for vendor in Vendor),
    dtypes=frozenset(COMPUTE_DTYPES.values()),
    head_sizes=SizeSet(minimum=1, maximum=576),
    head_sizes_v=SizeSet(minimum=1, maximum=576),
    kv_cache_dtypes=frozenset(
        {
            "auto",
            "float16",
            "bfloat16",
            "float32",
            "fp8",
            "fp8_e4m3",
            "fp8_e5m2",
            "int8_per_token_head",
        }
    ),
    block_sizes=(1,),
    attn_types=frozenset(AttentionType),
    kv_layouts=(KVCacheLayout.HND, KVCacheLayout.NHD),
    sinks=Support.SLOW,
    window=Support.YES,
    two_sided_window=Support.YES,
    chunked_local=Support.YES,
    softcap=Support.SLOW,
    alibi=Support.SLOW,
    non_causal=Support.YES,
    per_request_causal=Support.YES,
    mm_prefix=Support.YES,
    batch_invariant=Support.YES,
    kv_connector=Support.YES,
    per_head_quant_scales=Support.YES,
    lse=Support.SLOW,
    needs_exact_host_lengths=True,
    rules=(
        Rule(name="chunked_local_causal", check=_chunks_are_causal),
        Rule(name="mm_prefix_decoder", check=_ranges_are_of_decoders),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TorchSDPAMetadata:
    """One step, as the layers of a group read it.

    Attributes:
        num_actual_tokens: query rows that belong to requests.
        num_keys: keys that a cache-free call brings; 0 with a cache.
        plans: the calls for each visibility among the layers.
        scratch: where large gathers go.
    """

    num_actual_tokens: int
    num_keys: int
    plans: Mapping[Visibility, Plan]
    scratch: Workspace


class TorchSDPABackend(AttentionBackend):
    """scaled_dot_product_attention over gathered blocks."""

    name = _NAME
    attn_api = ">=1,<2"
    description = "torch scaled_dot_product_attention over gathered blocks; every feature"

    @classmethod
    def capability(cls, device: DeviceFacts, inventory: Inventory) -> Capability:
        """Return what it can do: the same on every device."""
        return _CAPABILITY

    @staticmethod
    def get_impl_cls() -> type[TorchSDPAImpl]:
        """Return the class that runs one layer."""
        return TorchSDPAImpl

    @staticmethod
    def get_builder_cls() -> type[TorchSDPAMetadataBuilder]:
        """Return the class that prepares each step."""
        return TorchSDPAMetadataBuilder


class TorchSDPAMetadataBuilder(AttentionMetadataBuilder[TorchSDPAMetadata]):
    """Cuts a batch into calls, from exact host lengths.

    Layers of one group may differ in window and chunks: each visibility gets a plan. Requests of
    a batch may come in any order. With `batch_invariant`, of the config or of any layer, every
    request is a call of its own, whose shapes depend on that request alone.

    Cascade attention computes the same result here as no cascade does: a valid
    `common_prefix_len` is accepted and saves nothing.
    """

    supports_update_block_table = True

    def __init__(
        self,
        kv_cache_spec: KVCacheSpec | None,
        layers: Mapping[str, LayerSpec],
        config: BuildConfig,
        device: torch.device,
    ) -> None:
        """Keep what every step needs.

        Raises:
            UnsupportedOptionError: layers differ in what one plan must share, or one is not served.
        """
        super().__init__(kv_cache_spec, layers, config, device)
        shared = ("attn_type", "num_heads", "num_kv_heads", "head_size", "head_size_v", "dtype")
        self._layer = require_uniform(layers, shared)
        for layer in layers.values():
            require_served(_NAME, _CAPABILITY, layer)
        self._block_size = self._read_block_size()
        limits = self._group_limits()
        self._tilers = tuple(
            Tiler(
                visibility=visibility,
                limits=limits,
                device=device,
                block_size=self._block_size,
            )
            for visibility in {_visibility(layer): None for layer in layers.values()}
        )
        self._scratch = config.workspace or Workspace(device)

    def _read_block_size(self) -> int | None:
        """Return tokens per block, None without a cache; all layers read the one that was given."""
        if self._layer.attn_type in CACHE_FREE:
            return None
        for name, layer in self.layers.items():
            if layer.kv_cache_spec != self.kv_cache_spec:
                raise UnsupportedOptionError(
                    f"kv_cache_spec={self.kv_cache_spec} is not that of layer {name}: "
                    f"{layer.kv_cache_spec}.",
                    hint="layers of one group share one cache format.",
                )
        return None if self.kv_cache_spec is None else self.kv_cache_spec.block_size

    def _group_limits(self) -> GroupLimits:
        layer = self._layer
        width = layer.head_size + layer.head_size_v
        return GroupLimits.of(
            self.device,
            key_bytes=layer.num_kv_heads * width * layer.dtype.itemsize,
            num_heads=layer.num_heads,
            is_invariant=self.config.batch_invariant
            or any(each.batch_invariant for each in self.layers.values()),
        )

    @classmethod
    def get_cudagraph_support(
        cls, config: BuildConfig, kv_cache_spec: KVCacheSpec | None
    ) -> AttentionCGSupport:
        """Return NEVER: the calls of a step depend on its lengths."""
        return AttentionCGSupport.NEVER

    def build(
        self, common_prefix_len: int, common: CommonAttentionMetadata, fast_build: bool = False
    ) -> TorchSDPAMetadata:
        """Return the step's metadata.

        Args:
            common_prefix_len: tokens of a shared prefix, checked and otherwise without effect.
            common: the batch, with exact host lengths.
            fast_build: without effect: there is one schedule.

        Raises:
            MetadataError: lengths are missing, contradict each other, or exceed the block table.
        """
        if common_prefix_len:
            self._check_cascade(common, common_prefix_len)
        batch = HostBatch.of(common, self._layer.attn_type, self._block_size)
        self._check_chunks(batch)
        return TorchSDPAMetadata(
            num_actual_tokens=batch.num_tokens,
            num_keys=batch.num_keys,
            plans={
                tiler.visibility: tiler.plan(batch, common.block_table) for tiler in self._tilers
            },
            scratch=self._scratch,
        )

    def update_block_table(
        self, metadata: TorchSDPAMetadata, block_table: Tensor, slot_mapping: Tensor
    ) -> TorchSDPAMetadata:
        """Return metadata of the same batch over another block table.

        Args:
            metadata: of the batch.
            block_table: (B, M) int32, as wide as the batch's longest request needs.
            slot_mapping: unused: it is handed to `do_kv_cache_update` by the caller.

        Raises:
            UnsupportedOptionError: the layers have no cache.
        """
        if self._block_size is None:
            raise UnsupportedOptionError("layers without a cache have no block table.")
        size = self._block_size
        plans = {
            visibility: plan.with_table(block_table, size)
            for visibility, plan in metadata.plans.items()
        }
        return replace(metadata, plans=plans)

    def _check_cascade(self, common: CommonAttentionMetadata, common_prefix_len: int) -> None:
        if self._block_size is None or self._layer.attn_type is not AttentionType.DECODER:
            raise UnsupportedOptionError(
                f"common_prefix_len={common_prefix_len} with attn_type={self._layer.attn_type}; "
                "allowed: 0.",
                hint="cascade attention is for decoders.",
            )
        check_cascade(common, common_prefix_len, block_size=self._block_size)

    def _check_chunks(self, batch: HostBatch) -> None:
        has_chunks = any(tiler.visibility.chunk_size for tiler in self._tilers)
        if has_chunks and not all(batch.is_causal):
            raise MetadataError.for_argument(
                "causal", list(batch.is_causal), "True for all requests of layers with chunk_size"
            )


class TorchSDPAImpl(AttentionImpl[TorchSDPAMetadata]):
    """Runs one layer.

    float32 means IEEE: where the process lets torch round float32 products (TF32, bfloat16), this
    layer computes in float64, and leaves the process's switch alone.
    """

    can_return_lse = True

    def __init__(self, spec: LayerSpec) -> None:
        """Build from the layer's description.

        Raises:
            InvalidRequestError: a value that no backend may accept.
            UnsupportedOptionError: the capability does not serve the layer.
        """
        super().__init__(spec)
        require_served(_NAME, _CAPABILITY, spec)
        self._checker = CallChecker(spec)
        self._visibility = _visibility(spec)
        self._is_cache_free = spec.attn_type in CACHE_FREE
        # A fused kernel may take the maximum before it scales, so the scale must be positive.
        has_extras = spec.has_sinks or spec.has_alibi or spec.softcap is not None
        self._needs_exact = has_extras or spec.scale <= 0

    def forward(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor | None,
        metadata: TorchSDPAMetadata,
        output: Tensor | None = None,
        *,
        lse: Tensor | None = None,
    ) -> Tensor:
        """Attend, and return the output; see `AttentionImpl.forward`.

        Raises:
            InvalidInputError: an argument does not fit the layer or the metadata.
            UnsupportedOptionError: the layer object carries an option that it was not built with.
        """
        self._checker.check_tensors(query, output, lse, metadata.num_actual_tokens)
        self._checker.check_layer(layer, query.device)
        plan = metadata.plans.get(self._visibility)
        if plan is None:
            raise InvalidInputError.for_argument(
                "metadata",
                f"planned for {list(metadata.plans)}",
                f"a plan for {self._visibility}",
                hint="build it with a builder that was given this layer.",
            )
        read = self._reader(layer, query.device, key, value, kv_cache, metadata)
        if output is None:
            output = query.new_empty((query.shape[0], self.spec.num_heads, self.spec.head_size_v))
        self._call(layer, query, output, lse, read).run(plan)
        return output

    def _reader(
        self,
        layer: AttentionLayer,
        device: torch.device,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor | None,
        metadata: TorchSDPAMetadata,
    ) -> Callable[[RequestTile | GroupTile], KeysValues]:
        """Return what reads a tile's keys and values, after checking where they come from."""
        if self._is_cache_free:
            key, value = self._checker.check_keys(key, value, kv_cache, device, metadata.num_keys)
            return CallReader(key=key, value=value).read
        cache, spec = self._checker.check_cache(kv_cache, device)
        return CacheReader(
            spec=spec,
            views=spec.split(cache),
            dtype=self.spec.dtype,
            k_scale=layer.k_scale,
            v_scale=layer.v_scale,
            scratch=metadata.scratch,
        ).read

    def _call(
        self,
        layer: AttentionLayer,
        query: Tensor,
        output: Tensor,
        lse: Tensor | None,
        read: Callable[[RequestTile | GroupTile], KeysValues],
    ) -> LayerCall:
        """Choose the path."""
        spec, device = self.spec, query.device
        accumulate = accumulator_dtype(device)
        fused = is_fused(device, spec.head_size, spec.head_size_v)
        # Only float32 operands, and a fallback that widens to float32, meet the process's switch.
        is_rounded = accumulate is not torch.float32 and (spec.dtype is torch.float32 or not fused)
        return LayerCall(
            query=query,
            output=output,
            lse=lse,
            read=read,
            num_kv_heads=spec.num_kv_heads,
            visibility=self._visibility,
            options=ExactOptions(
                scale=spec.scale,
                softcap=spec.softcap,
                alibi_slopes=layer.alibi_slopes,
                sinks=layer.sinks,
                accumulate=accumulate,
            ),
            is_exact=self._needs_exact or lse is not None or is_rounded,
            is_fused=fused,
            is_invariant=spec.batch_invariant,
        )


def _visibility(spec: LayerSpec) -> Visibility:
    return Visibility(window=spec.window, chunk_size=spec.chunk_size)
