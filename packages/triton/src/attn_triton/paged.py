"""What runs a layer of TRITON_ATTN, for backends on the same kernels under other names as well."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from attn_shared.backend import AttentionImpl, AttentionLayer
from attn_shared.call_checks import CallChecker
from attn_shared.errors import InvalidInputError, VendorMissingError, own_words
from attn_shared.kv_cache import AttentionSpec
from attn_shared.served import require_served
from attn_shared.spec import LayerSpec
from attn_triton._builder import TritonAttentionMetadataBuilder
from attn_triton._calls import LayerCalls
from attn_triton._capability import CAPABILITY, NAME
from attn_triton._keys import CacheReader, KeysValues, KeysValuesTensors, keys_of_call
from attn_triton._metadata import Step, TritonAttentionMetadata
from attn_triton._visibility import CACHE_FREE
from attn_triton.kv_write import write_kv

__all__ = [
    "CAPABILITY",
    "NAME",
    "TritonAttentionImpl",
    "TritonAttentionMetadata",
    "TritonAttentionMetadataBuilder",
    "load_triton",
]


def load_triton() -> None:
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


class TritonAttentionImpl(AttentionImpl[TritonAttentionMetadata]):
    """Runs one layer.

    Class attributes:
        backend_name: the backend whose layer it is.
    """

    backend_name: ClassVar[str] = NAME
    can_return_lse = True
    supports_pcp = True
    write_kv = staticmethod(write_kv)

    def __init__(self, spec: LayerSpec) -> None:
        """Build from the layer's description.

        Raises:
            InvalidRequestError: a value that no backend may accept.
            UnsupportedOptionError: the capability does not serve the layer.
        """
        super().__init__(spec)
        require_served(self.backend_name, CAPABILITY, spec)
        self._checker = CallChecker(spec)
        self._calls = LayerCalls(spec)
        cache = spec.kv_cache_spec
        self._reader = None
        self._reads_fresh = not getattr(cache, "is_quantized", False)
        if spec.attn_type not in CACHE_FREE and isinstance(cache, AttentionSpec):
            self._reader = CacheReader(cache)

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
        step = self._step_of(metadata)
        device = query.device
        self._checker.check_tensors(query, output, lse, metadata.num_actual_tokens, device)
        self._checker.check_layer(layer, device)
        keys, tensors = self._keys(key, value, kv_cache, device, metadata)
        if output is None:
            output = query.new_empty((query.shape[0], self.spec.num_heads, self.spec.head_size_v))
        fresh = self._fresh(key, value, metadata)
        self._calls.run(layer, query, output, lse, keys, tensors, fresh, metadata, step)
        return output

    def check_metadata(self, metadata: TritonAttentionMetadata) -> None:
        """Refuse another backend's metadata, and a step without a plan for this layer."""
        self._step_of(metadata)

    def _step_of(self, metadata: TritonAttentionMetadata) -> Step:
        """Return the step's launches; refuse another backend's, and a step that has none."""
        if not isinstance(metadata, TritonAttentionMetadata):
            raise InvalidInputError.for_argument(
                "metadata",
                f"a {type(metadata).__name__}",
                "a TritonAttentionMetadata",
                hint=f"build it with a {self.backend_name} builder that was given this layer.",
            )
        return self._calls.planned(metadata)

    def _fresh(
        self, key: Tensor | None, value: Tensor | None, metadata: TritonAttentionMetadata
    ) -> tuple[Tensor, Tensor] | None:
        """Return the step's keys and values where they may be read in the cache's stead.

        They are what the cache holds, bit for bit, unless that is quantised.
        """
        prompts = metadata.prompts
        if key is None or value is None or prompts is None:
            return None
        if self._reader is None:
            return key, value
        may_be_read = self._reads_fresh or prompts.kind.allows_fresh
        is_whole = min(key.shape[0], value.shape[0]) >= metadata.num_actual_tokens
        return (key, value) if may_be_read and is_whole else None

    def _keys(
        self,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor | None,
        device: torch.device,
        metadata: TritonAttentionMetadata,
    ) -> tuple[KeysValues, Callable[[], KeysValuesTensors]]:
        """Return where keys and values are, after checking it."""
        if self._reader is not None and kv_cache is not None:
            known = self._reader.known(kv_cache)
            if known is not None and known.device == device:
                self._checker.check_written_keys(key, value, device)
                return known, partial(self._reader.tensors, kv_cache)
        if self._reader is None:
            key, value = self._checker.check_keys(key, value, kv_cache, device, metadata.num_keys)
            key, value = _dense(key), _dense(value)
            return keys_of_call(key, value), lambda: (key, value, None, None)
        cache, _ = self._checker.check_cache(kv_cache, device)
        self._checker.check_written_keys(key, value, device)
        return self._reader.read(cache), partial(self._reader.tensors, cache)


def _dense(rows: Tensor) -> Tensor:
    return rows if rows.stride(-1) == 1 else rows.contiguous()
