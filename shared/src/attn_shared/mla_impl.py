"""What the layers of all backends over latents do around their kernel's call."""

from __future__ import annotations

from abc import abstractmethod
from typing import Generic, TypeVar

from torch import Tensor

from attn_shared.alignment import ALIGNMENT_BYTES, is_aligned
from attn_shared.backend import AttentionLayer, MLAAttentionImpl
from attn_shared.call_checks import CallChecker
from attn_shared.errors import UnsupportedOptionError
from attn_shared.kv_cache import MLAAttentionSpec
from attn_shared.loaded_devices import LoadedDevice, LoadedDevices
from attn_shared.mla_edges import to_contract_lse
from attn_shared.mla_metadata import MLAMetadata
from attn_shared.request import MLADims
from attn_shared.spec import LayerSpec

__all__ = ["VendorMLAImpl"]

D = TypeVar("D")
"""The backend's metadata of the decodes."""


class VendorMLAImpl(MLAAttentionImpl[MLAMetadata[D]], Generic[D]):
    """Runs one layer on a vendor's decode.

    Attributes:
        loaded: the device that the layer was built for.
        dims: the layer's widths.
    """

    def __init__(
        self,
        spec: LayerSpec,
        devices: LoadedDevices,
        name: str,
        *,
        can_return_lse: bool = True,
    ) -> None:
        """Refuse a layer that is not served.

        Args:
            spec: of the layer.
            devices: where the backend is loaded.
            name: of the backend.
            can_return_lse: of the release that is installed.

        Raises:
            InvalidRequestError: a value that no backend may accept.
            UnsupportedOptionError: with every reason.
            VendorMissingError: the process has loaded nothing.
        """
        super().__init__(spec)
        self.loaded: LoadedDevice = devices.serving(spec)
        self._name = name
        self._checker = CallChecker(spec, returns_lse=can_return_lse)
        self.can_return_lse = can_return_lse
        dims, cache = _served(spec, name, self.loaded)
        self.dims: MLADims = dims
        self.is_quantized = cache.is_quantized

    @abstractmethod
    def decode(
        self,
        layer: AttentionLayer,
        query: Tensor,
        kv_cache: Tensor,
        step: D,
        out: Tensor | None,
        *,
        with_lse: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Return output (T, H, kv_lora_rank) and, if it is wanted, LSE (H, T), both of T decodes.

        An LSE of +inf is taken for -inf. `out` may be written and returned.
        """

    def forward_mqa(
        self,
        layer: AttentionLayer,
        query: Tensor,
        kv_cache: Tensor,
        metadata: MLAMetadata[D],
        output: Tensor | None = None,
        *,
        lse: Tensor | None = None,
    ) -> Tensor:
        """Decode; see `MLAAttentionImpl.forward_mqa`.

        Raises:
            InvalidInputError: an argument does not fit the layer or the metadata.
            UnsupportedOptionError: the layer object carries an option that it was not built with.
        """
        self._checker.check_decode_inputs(layer, query, kv_cache, metadata, output, lse)
        self.check_metadata(metadata)
        self._check_aligned(kv_cache)
        step, count = metadata.decode, metadata.num_decode_tokens
        if step is None:
            return self._whole(query, output, 0)
        rows, out = query, output
        num_rows = query.shape[0]  # len() goes through torch's Python
        if num_rows != count:
            rows, out = query[:count], None if output is None else output[:count]
        result, found = self.decode(layer, rows, kv_cache, step, out, with_lse=lse is not None)
        if lse is not None and found is not None:
            lse[:, :count].copy_(to_contract_lse(found))
        if output is None and num_rows == count:
            return result
        output = self._whole(query, output, count)
        if result.data_ptr() != output.data_ptr():
            output[:count].copy_(result)
        return output

    def _check_aligned(self, kv_cache: Tensor) -> None:
        if not is_aligned(kv_cache):
            raise UnsupportedOptionError(
                f"{self._name} was given a cache whose blocks do not all begin at a multiple of "
                f"{ALIGNMENT_BYTES} bytes: address {kv_cache.data_ptr():#x}, strides "
                f"{kv_cache.stride()} of {kv_cache.dtype}; allowed: such ones.",
                hint="allocate it by the layer's kv_cache_spec.",
            )

    def _whole(self, query: Tensor, output: Tensor | None, count: int) -> Tensor:
        """Return the caller's output, or a new one with zeros behind the decodes."""
        if output is None:
            output = query.new_empty((len(query), self.spec.num_heads, self.spec.head_size_v))
            output[count:].zero_()
        return output


def _served(spec: LayerSpec, name: str, loaded: LoadedDevice) -> tuple[MLADims, MLAAttentionSpec]:
    """Return widths and cache of a layer, after refusing a cache that kernels cannot read."""
    cache = spec.kv_cache_spec
    if spec.mla is None or not isinstance(cache, MLAAttentionSpec):
        raise UnsupportedOptionError(f"{name} serves layers with a cache of latents alone.")
    own = loaded.device.fp8_dtype
    if cache.is_quantized and cache.dtype is not own:
        raise UnsupportedOptionError(
            f"a cache of {cache.dtype} is not served by {name} on {loaded.device.arch}; "
            f"allowed: {own}."
        )
    if cache.page_size_bytes % ALIGNMENT_BYTES:
        raise UnsupportedOptionError(
            f"page_size_padded={cache.page_size_padded} is not served by {name}; allowed: a "
            f"multiple of {ALIGNMENT_BYTES} bytes, which its kernels load at once."
        )
    return spec.mla, cache
