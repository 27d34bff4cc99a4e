"""TORCH_SDPA: paged attention on torch alone, right for the whole contract on any device.

Blocks are gathered into dense keys and values, which scaled_dot_product_attention reads. What it
has no argument for (LSE, sinks, softcap, ALiBi) goes through matrix products in float32 instead:
right, but slower, and declared as such.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attn_shared.backend import AttentionBackend, AttentionImpl, AttentionLayer
from attn_shared.call_checks import CallChecker
from attn_shared.capability import Capability
from attn_shared.device import DeviceFacts
from attn_shared.dtypes import KVQuantMode
from attn_shared.errors import InvalidInputError
from attn_shared.kv_cache import AttentionSpec
from attn_shared.served import require_served
from attn_shared.spec import LayerSpec
from attn_torch._batch import CACHE_FREE
from attn_torch._cache_reader import CacheReader, CallReader
from attn_torch._paths import CallMaker, Read
from attn_torch._plan import Plan
from attn_torch._sdpa_capability import CAPABILITY, NAME, capability_on
from attn_torch._sdpa_metadata import TorchSDPAMetadata, TorchSDPAMetadataBuilder, visibility_of

if TYPE_CHECKING:
    from attn_shared.inventory import Inventory

__all__ = [
    "TorchSDPABackend",
    "TorchSDPAImpl",
    "TorchSDPAMetadata",
    "TorchSDPAMetadataBuilder",
]


class TorchSDPABackend(AttentionBackend):
    """scaled_dot_product_attention over gathered blocks."""

    name = NAME
    attn_api = ">=1,<2"
    description = "torch scaled_dot_product_attention over gathered blocks; every feature"

    @classmethod
    def capability(cls, device: DeviceFacts, inventory: Inventory) -> Capability:
        """Return what it can do: the same on every device, but for the preferred layout."""
        return capability_on(device)

    @staticmethod
    def get_impl_cls() -> type[TorchSDPAImpl]:
        """Return the class that runs one layer."""
        return TorchSDPAImpl

    @staticmethod
    def get_builder_cls() -> type[TorchSDPAMetadataBuilder]:
        """Return the class that prepares each step."""
        return TorchSDPAMetadataBuilder


class TorchSDPAImpl(AttentionImpl[TorchSDPAMetadata]):
    """Runs one layer.

    float32 means IEEE: where the process lets torch round float32 products (TF32, bfloat16), this
    layer computes in float64, and leaves the process's switch alone.
    """

    can_return_lse = True
    supports_pcp = True

    def __init__(self, spec: LayerSpec) -> None:
        """Build from the layer's description.

        Raises:
            InvalidRequestError: a value that no backend may accept.
            UnsupportedOptionError: the capability does not serve the layer.
        """
        super().__init__(spec)
        require_served(NAME, CAPABILITY, spec)
        self._checker = CallChecker(spec)
        self._visibility = visibility_of(spec)
        self._is_cache_free = spec.attn_type in CACHE_FREE
        cache = spec.kv_cache_spec
        self._quant_mode = (
            cache.quant_mode if isinstance(cache, AttentionSpec) else KVQuantMode.NONE
        )
        # A fused kernel may take the maximum before it scales, so the scale must be positive.
        has_extras = spec.has_sinks or spec.has_alibi or spec.softcap is not None
        self._calls = CallMaker(
            spec=spec,
            visibility=self._visibility,
            num_kv_heads=spec.num_kv_heads,
            needs_exact=has_extras or spec.scale <= 0,
        )

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
        plan = self._plan(metadata)
        self._checker.check_tensors(query, output, lse, metadata.num_actual_tokens)
        self._checker.check_layer(layer, query.device)
        read = self._reader(layer, query.device, key, value, kv_cache, metadata)
        if output is None:
            output = query.new_empty((query.shape[0], self.spec.num_heads, self.spec.head_size_v))
        call = self._calls.make(
            query, output, lse, read, alibi_slopes=layer.alibi_slopes, sinks=layer.sinks
        )
        call.run(plan)
        return output

    def check_metadata(self, metadata: TorchSDPAMetadata) -> None:
        """Refuse another backend's metadata, and a step without a plan for this layer."""
        self._plan(metadata)

    def _plan(self, metadata: TorchSDPAMetadata) -> Plan:
        """Return the step's calls for this layer."""
        hint = "build it with a TORCH_SDPA builder that was given this layer."
        if not isinstance(metadata, TorchSDPAMetadata):
            raise InvalidInputError.for_argument(
                "metadata", f"a {type(metadata).__name__}", "a TorchSDPAMetadata", hint=hint
            )
        plan = metadata.plans.get(self._visibility)
        if plan is None:
            raise InvalidInputError.for_argument(
                "metadata",
                f"planned for {list(metadata.plans)}",
                f"a plan for {self._visibility}",
                hint=hint,
            )
        return plan

    def _reader(
        self,
        layer: AttentionLayer,
        device: torch.device,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor | None,
        metadata: TorchSDPAMetadata,
    ) -> Read:
        """Return what reads a tile's keys and values, after checking where they come from."""
        if self._is_cache_free:
            key, value = self._checker.check_keys(key, value, kv_cache, device, metadata.num_keys)
            return CallReader(key=key, value=value).read
        cache, spec = self._checker.check_cache(kv_cache, device)
        self._checker.check_written_keys(key, value, device)
        return CacheReader(
            views=spec.split(cache),
            quant_mode=self._quant_mode,
            dtype=self.spec.dtype,
            k_scale=layer.k_scale,
            v_scale=layer.v_scale,
            scratch=metadata.scratch,
        ).read
