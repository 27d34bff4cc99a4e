"""CPU_ATTN: paged attention in C++, one call for decode, prefill, chunked and mixed batches.

Keys and values lie in plain row-major blocks, so that a block means the same to every backend. Each
row of them is read once for all query heads that share it. The code is chosen by the CPU that it
runs on: AMX, AVX-512, AVX2, or what any processor understands.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import is_
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from attn_cpu._attn_batch import CACHE_FREE
from attn_cpu._attn_capability import CAPABILITY, NAME
from attn_cpu._attn_metadata import CpuAttnMetadata, CpuAttnMetadataBuilder
from attn_cpu._calls import LIBRARY, Keys, attend, load_kernels
from attn_cpu._layer_record import record_of
from attn_cpu._ops import call, direct, op
from attn_cpu._paths import kernel_paths_of
from attn_cpu._plans import Plan, sight_of
from attn_cpu._scales import ScaleTensors
from attn_cpu._views import CacheViews
from attn_cpu.isa import BEST, IsaLevel, forced_level
from attn_shared.backend import AttentionBackend, AttentionImpl, AttentionLayer
from attn_shared.call_checks import CallChecker
from attn_shared.errors import InvalidInputError, UnsupportedOptionError
from attn_shared.kernel_paths import KernelPath
from attn_shared.kv_cache import AttentionSpec
from attn_shared.served import require_served
from attn_shared.spec import LayerSpec

if TYPE_CHECKING:
    from attn_shared.capability import Capability
    from attn_shared.device import DeviceFacts
    from attn_shared.inventory import Inventory
    from attn_shared.request import AttentionRequest

__all__ = ["CpuAttnBackend", "CpuAttnImpl", "CpuAttnMetadata", "CpuAttnMetadataBuilder"]

_HOST = torch.device("cpu")

_Short = tuple[object, object, Tensor, Callable[..., None], Callable[..., None]]
"""A layer's scales and record, and the ops of short calls: to attend, to write and attend."""


class CpuAttnBackend(AttentionBackend):
    """The kernels of this distribution."""

    name = NAME
    attn_api = ">=1,<2"
    description = "native C++ for AVX2, AVX-512 and AMX over plain blocks; every feature"
    vendor_libraries = (LIBRARY,)

    @classmethod
    def capability(cls, device: DeviceFacts, inventory: Inventory) -> Capability:
        """Return what it can do: the same on every CPU."""
        return CAPABILITY

    @classmethod
    def kernel_paths(
        cls, request: AttentionRequest, device: DeviceFacts, inventory: Inventory
    ) -> tuple[KernelPath, ...]:
        """Return the level of instructions that the kernels run on."""
        return kernel_paths_of(request, device, inventory)

    @staticmethod
    def get_impl_cls() -> type[CpuAttnImpl]:
        """Return the class that runs one layer."""
        return CpuAttnImpl

    @staticmethod
    def get_builder_cls() -> type[CpuAttnMetadataBuilder]:
        """Return the class that prepares each step."""
        return CpuAttnMetadataBuilder

    @classmethod
    def load_vendor(cls, device: DeviceFacts, inventory: Inventory) -> None:
        """Load the library.

        Raises:
            VendorMissingError: it does not load; in its own words.
        """
        load_kernels(NAME, inventory)


class CpuAttnImpl(AttentionImpl[CpuAttnMetadata]):
    """Runs one layer.

    Class attributes:
        isa: the level of instructions to use, whatever `attn_cpu.isa.forced` says; BEST leaves it.
    """

    can_return_lse = True
    supports_pcp = True
    isa: ClassVar[IsaLevel | int] = BEST

    def __init__(self, spec: LayerSpec) -> None:
        """Build from the layer's description.

        Raises:
            InvalidRequestError: a value that no backend may accept.
            UnsupportedOptionError: the capability does not serve the layer, or its fp8 cache is of
                a flavour that the kernels do not read.
        """
        super().__init__(spec)
        require_served(NAME, CAPABILITY, spec)
        self._checker = CallChecker(spec)
        self._sight = sight_of(spec)
        self._is_cache_free = spec.attn_type in CACHE_FREE
        self._scales = ScaleTensors()
        self._output_tail = (spec.num_heads, spec.head_size_v)
        self._options = (spec.scale, spec.softcap, *spec.window, spec.chunk_size)
        self._seen_layer: tuple[object, ...] = ()
        self._short: _Short | None = None
        own = spec.kv_cache_spec
        self._views = CacheViews(own) if isinstance(own, AttentionSpec) else None
        self._takes_scales = (
            isinstance(own, AttentionSpec) and own.is_quantized and not own.has_inline_scales
        )
        if isinstance(own, AttentionSpec) and own.dtype is torch.float8_e4m3fnuz:
            raise UnsupportedOptionError(
                f"{NAME} does not serve a cache of float8_e4m3fnuz; allowed: float8_e4m3fn.",
                hint="allocate the cache with fp8_e4m3_dtype=torch.float8_e4m3fn.",
            )

    def forward(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor | None,
        metadata: CpuAttnMetadata,
        output: Tensor | None = None,
        *,
        lse: Tensor | None = None,
    ) -> Tensor:
        """Attend, and return the output; see `AttentionImpl.forward`.

        Raises:
            InvalidInputError: an argument does not fit the layer or the metadata.
            UnsupportedOptionError: the layer object carries an option that it was not built with.
        """
        short = self._short
        if (
            short is not None
            and lse is None
            and layer.k_scale is short[0]
            and layer.v_scale is short[1]
            and layer.sinks is None
            and layer.alibi_slopes is None
        ):
            # All in one place: with caches cold, each function and object beside it costs as much
            # as reading some hundred keys.
            try:
                plan = metadata.plans[self._sight]
                out = torch.empty_like(query) if output is None else output
                short[3](
                    query,
                    out,
                    key,
                    value,
                    kv_cache,
                    metadata.batch.block_table,
                    plan.pieces,
                    plan.workspace,
                    short[2],
                    forced_level() if self.isa == BEST else self.isa,
                )
                return out
            except (AttributeError, KeyError, RuntimeError, TypeError, ValueError):
                pass  # refused: the checks of the long way have the words
        return self._forward(layer, query, key, value, kv_cache, metadata, output, lse)

    def write_and_attend(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        metadata: CpuAttnMetadata,
        output: Tensor | None = None,
    ) -> Tensor | None:
        """Write and attend by one op, where the short call serves; see `AttentionImpl`."""
        short = self._short
        if (
            short is None
            or layer.k_scale is not short[0]
            or layer.v_scale is not short[1]
            or layer.sinks is not None
            or layer.alibi_slopes is not None
        ):
            return None
        try:
            plan = metadata.plans[self._sight]
            out = torch.empty_like(query) if output is None else output
            short[4](
                query,
                out,
                key,
                value,
                kv_cache,
                slot_mapping,
                metadata.batch.block_table,
                plan.pieces,
                plan.workspace,
                short[2],
                forced_level() if self.isa == BEST else self.isa,
            )
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError):
            return None  # refused, and nothing written: the checks of the long way have the words
        return out

    def _forward(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor | None,
        metadata: CpuAttnMetadata,
        output: Tensor | None,
        lse: Tensor | None,
    ) -> Tensor:
        """Attend with any option, everything checked; find out whether the short way serves."""
        plan = self._plan(metadata)
        self._checker.check_tensors(query, output, lse, metadata.batch.num_tokens, _HOST)
        self._check_layer(layer)
        keys = self._keys(layer, key, value, kv_cache, metadata)
        if output is None:
            output = query.new_empty((query.shape[0], *self._output_tail))
        attend(
            query,
            output,
            lse,
            keys,
            metadata.batch,
            plan,
            self._options,
            layer.sinks,
            layer.alibi_slopes,
            metadata.is_checked,
            self.isa,
        )
        return output

    def check_metadata(self, metadata: CpuAttnMetadata) -> None:
        """Refuse another backend's metadata, and a step without a plan for this layer."""
        self._plan(metadata)

    def _plan(self, metadata: CpuAttnMetadata) -> Plan:
        """Return the step's partition for this layer."""
        hint = f"build it with a {NAME} builder that was given this layer."
        if not isinstance(metadata, CpuAttnMetadata):
            raise InvalidInputError.for_argument(
                "metadata", f"a {type(metadata).__name__}", "a CpuAttnMetadata", hint=hint
            )
        plan = metadata.plans.get(self._sight)
        if plan is None:
            raise InvalidInputError.for_argument(
                "metadata",
                f"planned for {list(metadata.plans)}",
                f"a plan for {self._sight}",
                hint=hint,
            )
        return plan

    def _check_layer(self, layer: AttentionLayer) -> None:
        """Check the layer's options where they are not the ones that were found right before."""
        given = (layer.sinks, layer.alibi_slopes, layer.k_scale, layer.v_scale)
        if len(self._seen_layer) == len(given) and all(map(is_, given, self._seen_layer)):
            return
        self._checker.check_layer(layer, _HOST)
        record = record_of(self.spec, layer.k_scale, layer.v_scale)
        if record is None:
            self._short = None
        else:
            ops = direct("attention_cached"), direct("write_and_attend")
            self._short = (layer.k_scale, layer.v_scale, record, *ops)
        self._seen_layer = given

    def _keys(
        self,
        layer: AttentionLayer,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor | None,
        metadata: CpuAttnMetadata,
    ) -> Keys:
        """Return where keys and values are, after checking them."""
        if self._is_cache_free:
            num_keys = metadata.batch.num_keys
            return Keys(*self._checker.check_keys(key, value, kv_cache, _HOST, num_keys))
        if key is not None or value is not None:
            self._checker.check_written_keys(key, value, _HOST)
        return self._cached(layer, kv_cache)

    def _cached(self, layer: AttentionLayer, kv_cache: Tensor | None) -> Keys:
        """Return keys and values of the cache, after checking it."""
        if kv_cache is None or self._views is None or not kv_cache.is_cpu:
            kv_cache, spec = self._checker.check_cache(kv_cache, _HOST)  # says what is wrong
            raise UnsupportedOptionError(f"{NAME} does not read a cache of {spec}.")
        key, value, key_scales, value_scales = self._views.of(kv_cache)
        if not self._takes_scales:
            return Keys(key, value, None, None, key_scales, value_scales)
        return Keys(key, value, self._scales.of(layer.k_scale), self._scales.of(layer.v_scale))

    def do_kv_cache_update(
        self,
        layer: AttentionLayer,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
    ) -> None:
        """Write the step's keys and values; see `AttentionImpl.do_kv_cache_update`.

        Raises:
            InvalidInputError: an argument does not fit the layer or its cache, or a slot is outside
                the cache.
            UnsupportedOptionError: the layer has no paged cache.
        """
        if self._views is None:
            raise UnsupportedOptionError("this layer has no paged cache to write.")
        self._checker.check_written_keys(key, value, _HOST)
        self._check_layer(layer)
        keys = self._cached(layer, kv_cache)
        call(
            op("write_kv"),
            key,
            value,
            keys.key,
            keys.value,
            slot_mapping,
            keys.k_scale,
            keys.v_scale,
            keys.key_scales,
            keys.value_scales,
            True,
        )
