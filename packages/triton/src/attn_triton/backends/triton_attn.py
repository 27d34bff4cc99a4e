"""TRITON_ATTN: paged attention in portable Triton, for NVIDIA, AMD and Intel GPUs.

Requests of few query tokens have their keys cut into parts that fill the device once; the others
run by blocks of query rows. Both kernels serve the whole contract; what a batch does not ask for
costs nothing, as it is compiled out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attn_shared.backend import AttentionBackend, AttentionImpl, AttentionLayer
from attn_shared.call_checks import CallChecker
from attn_shared.capability import Capability
from attn_shared.device import DeviceFacts
from attn_shared.errors import InvalidInputError, VendorMissingError, own_words
from attn_shared.served import require_served
from attn_shared.spec import LayerSpec
from attn_triton._calls import KeysValues, LayerCalls
from attn_triton._capability import CAPABILITY, NAME
from attn_triton._metadata import TritonAttentionMetadata, TritonAttentionMetadataBuilder
from attn_triton._visibility import CACHE_FREE

if TYPE_CHECKING:
    from attn_shared.inventory import Inventory

__all__ = [
    "TritonAttentionBackend",
    "TritonAttentionImpl",
    "TritonAttentionMetadata",
    "TritonAttentionMetadataBuilder",
]


class TritonAttentionBackend(AttentionBackend):
    """Split-KV decode and blocked prefill in Triton."""

    name = NAME
    attn_api = ">=1,<2"
    vendor_libraries = ("triton",)
    description = "portable Triton kernels: split-KV decode, blocked prefill; every feature"

    @classmethod
    def capability(cls, device: DeviceFacts, inventory: Inventory) -> Capability:
        """Return what it can do: the same on every device, but for the rules on the device."""
        return CAPABILITY

    @classmethod
    def load_vendor(cls, device: DeviceFacts, inventory: Inventory) -> None:
        """Import Triton and see that it can run kernels here.

        Raises:
            VendorMissingError: it does not import, or has no active driver.
        """
        try:
            from attn_triton.kernels.loading import require_driver

            require_driver()
        except Exception as error:
            raise VendorMissingError(
                f"triton cannot run kernels here: {own_words(error)}",
                library="triton",
                hint="install the triton that this torch requires, and a driver for the device.",
            ) from error

    @staticmethod
    def get_impl_cls() -> type[TritonAttentionImpl]:
        """Return the class that runs one layer."""
        return TritonAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[TritonAttentionMetadataBuilder]:
        """Return the class that prepares each step."""
        return TritonAttentionMetadataBuilder


class TritonAttentionImpl(AttentionImpl[TritonAttentionMetadata]):
    """Runs one layer."""

    can_return_lse = True

    def __init__(self, spec: LayerSpec) -> None:
        """Build from the layer's description.

        Raises:
            InvalidRequestError: a value that no backend may accept.
            UnsupportedOptionError: the capability does not serve the layer.
        """
        super().__init__(spec)
        require_served(NAME, CAPABILITY, spec)
        self._checker = CallChecker(spec)
        self._calls = LayerCalls(spec)
        self._is_cache_free = spec.attn_type in CACHE_FREE

    def forward(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor | None,
        metadata: TritonAttentionMetadata,
        output: Tensor | None = None,
        *,
        lse: Tensor | None = None,
    ) -> Tensor:
        """Attend, and return the output; see `AttentionImpl.forward`.

        Raises:
            InvalidInputError: an argument does not fit the layer or the metadata.
            UnsupportedOptionError: the layer object carries an option that it was not built with.
        """
        self._check_metadata(metadata)
        device = query.device
        self._checker.check_tensors(query, output, lse, metadata.num_actual_tokens, device)
        self._checker.check_layer(layer, device)
        keys = self._keys(key, value, kv_cache, device, metadata)
        if output is None:
            output = query.new_empty((query.shape[0], self.spec.num_heads, self.spec.head_size_v))
        if query.stride(2) != 1:
            query = query.contiguous()
        self._calls.run(layer, query, output, lse, keys, metadata)
        return output

    def _check_metadata(self, metadata: TritonAttentionMetadata) -> None:
        hint = f"build it with a {NAME} builder that was given this layer."
        if not isinstance(metadata, TritonAttentionMetadata):
            raise InvalidInputError.for_argument(
                "metadata", f"a {type(metadata).__name__}", "a TritonAttentionMetadata", hint=hint
            )
        if self._calls.visibility not in metadata.plans:
            raise InvalidInputError.for_argument(
                "metadata",
                f"planned for {list(metadata.plans)}",
                f"a plan for {self._calls.visibility}",
                hint=hint,
            )

    def _keys(
        self,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor | None,
        device: torch.device,
        metadata: TritonAttentionMetadata,
    ) -> KeysValues:
        """Return where keys and values are, after checking it."""
        if self._is_cache_free:
            key, value = self._checker.check_keys(key, value, kv_cache, device, metadata.num_keys)
            return KeysValues.of_call(key, value)
        cache, spec = self._checker.check_cache(kv_cache, device)
        self._checker.check_written_keys(key, value, device)
        return KeysValues.of_cache(spec.split(cache))
