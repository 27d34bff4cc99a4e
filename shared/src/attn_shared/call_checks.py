"""What a call of `forward` must fulfil, checked on shapes, dtypes and places before any kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attn_shared.errors import InvalidInputError, UnsupportedOptionError
from attn_shared.kv_cache import AttentionSpec, MLAAttentionSpec
from attn_shared.mla_metadata import require_mla_metadata
from attn_shared.spec import LayerSpec
from attn_shared.tensor_checks import (
    check_is_tensor,
    check_like,
    check_rows,
    check_scale_form,
    check_shape,
)

if TYPE_CHECKING:
    from attn_shared.impl import AttentionLayer

__all__ = ["CallChecker"]


class CallChecker:
    """Checks the calls of one layer. It costs some microseconds and never synchronises a device.

    An implementation builds one in its constructor, and in `forward` calls `check_tensors` and
    `check_layer`, then `check_keys` for keys that come with the call, or `check_cache` and
    `check_written_keys` for those of a cache; `check_call` is three of these in one pass.
    """

    def __init__(self, spec: LayerSpec, *, returns_lse: bool = True) -> None:
        """Keep what every call of a layer of this description must fulfil.

        Args:
            spec: of the layer.
            returns_lse: whether the implementation serves the argument `lse`.
        """
        cache = spec.kv_cache_spec
        self.spec = spec
        self._returns_lse = returns_lse
        self._takes_scales = (
            isinstance(cache, AttentionSpec) and cache.is_quantized and not cache.has_inline_scales
        ) or (isinstance(cache, MLAAttentionSpec) and cache.is_quantized)
        self._dtype = spec.dtype
        self._num_heads, self._num_kv_heads = spec.num_heads, spec.num_kv_heads
        self._head_size, self._head_size_v = spec.head_size, spec.head_size_v
        # Scale tensors on the host whose contents were found to be 1.
        self._seen_scales: dict[str, Tensor] = {}
        # The scales of the last call that was found right.
        self._right_scales: tuple[object, object] = (object(), object())

    def check_call(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        output: Tensor | None,
        lse: Tensor | None,
        num_tokens: int,
        device: torch.device,
    ) -> None:
        """Do what `check_tensors`, `check_written_keys` and `check_layer` do, in one pass.

        Args:
            layer: the calling layer.
            query: as in `check_tensors`.
            key: as in `check_written_keys`.
            value: as there.
            output: as in `check_tensors`.
            lse: as there.
            num_tokens: as there.
            device: where the metadata is.

        Raises:
            InvalidInputError: as they do.
            UnsupportedOptionError: as they do.
        """
        if lse is not None or not self._is_usual(query, key, value, output, num_tokens, device):
            self.check_tensors(query, output, lse, num_tokens, device)
            self.check_written_keys(key, value, device)
        self.check_layer(layer, device)

    def _is_usual(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        output: Tensor | None,
        num_tokens: int,
        device: torch.device,
    ) -> bool:
        """Whether a call is surely right: a quick yes; after a no the checks themselves say why."""
        if not (
            isinstance(query, Tensor)
            and isinstance(output, Tensor)
            and isinstance(key, Tensor)
            and isinstance(value, Tensor)
            and query.layout is output.layout is key.layout is value.layout is torch.strided
            and query.dtype is output.dtype is key.dtype is value.dtype is self._dtype
            and query.device == output.device == key.device == value.device == device
        ):
            return False
        rows, keys, values = query.shape, key.shape, value.shape
        if not len(rows) == len(keys) == len(values) == 3:
            return False
        num_rows, num_heads, head_size_v = rows[0], self._num_heads, self._head_size_v
        return (
            num_tokens <= num_rows
            and rows[1] == num_heads
            and rows[2] == keys[2] == self._head_size
            and keys[1] == values[1] == self._num_kv_heads
            and values[2] == head_size_v
            and output.shape == (num_rows, num_heads, head_size_v)
        )

    def check_tensors(
        self,
        query: Tensor,
        output: Tensor | None,
        lse: Tensor | None,
        num_tokens: int,
        device: torch.device | None = None,
    ) -> None:
        """Refuse a query, output or LSE of another layer or of another batch.

        Args:
            query: (T, Hq, D).
            output: (T, Hq, Dv), or None.
            lse: (Hq, T), or None.
            num_tokens: rows that the metadata describes; T is at least as many.
            device: where the metadata is; None: wherever the query is.

        Raises:
            InvalidInputError: names the argument, its value and what is allowed.
            UnsupportedOptionError: an LSE is asked of an implementation that returns none.
        """
        spec = self.spec
        check_is_tensor("query", query)
        shape = query.shape
        if len(shape) != 3 or shape[1] != spec.num_heads or shape[2] != spec.head_size:
            raise InvalidInputError.for_argument(
                "query shape", tuple(shape), f"(T, {spec.num_heads}, {spec.head_size})"
            )
        rows = shape[0]
        if rows < num_tokens:
            raise InvalidInputError.for_argument(
                "query rows",
                rows,
                f"at least {num_tokens}, the tokens that the metadata describes",
                hint="pass the metadata (or the plan) that was built for this batch.",
            )
        if query.dtype is not spec.dtype:
            raise InvalidInputError.for_argument("query dtype", query.dtype, str(spec.dtype))
        if device is not None and query.device != device:
            raise InvalidInputError.for_argument(
                "query device", query.device, f"{device}, the metadata's"
            )
        device = query.device
        if output is not None:
            check_shape("output", output, (rows, spec.num_heads, spec.head_size_v))
            check_like("output", output, spec.dtype, device)
        if lse is not None:
            self._check_lse(lse, rows, device)

    def _check_lse(self, lse: Tensor, rows: int, device: torch.device) -> None:
        if not self._returns_lse:
            raise UnsupportedOptionError(
                "lse is given, and this backend returns none.",
                hint="select with needs_lse=True.",
            )
        check_shape("lse", lse, (self.spec.num_heads, rows))
        check_like("lse", lse, torch.float32, device)

    def check_latents(
        self,
        query: Tensor,
        latent: Tensor,
        rope: Tensor,
        output: Tensor | None,
        lse: Tensor | None,
        num_tokens: int,
    ) -> None:
        """Refuse tensors of a step over latents, before its cache is written.

        Args:
            query: (T, H, qk_nope_head_dim + qk_rope_head_dim).
            latent: (T, kv_lora_rank).
            rope: (T, qk_rope_head_dim).
            output: (T, H, v_head_dim), or None.
            lse: (H, T) float32, or None.
            num_tokens: rows that the metadata describes; T is at least as many.

        Raises:
            InvalidInputError: names the argument, its value and what is allowed.
            UnsupportedOptionError: an LSE is asked of an implementation that returns none.
        """
        spec, dims = self.spec, self.spec.mla
        if dims is None:
            raise UnsupportedOptionError("this layer has no latents.")
        heads, key = spec.num_heads, dims.qk_nope_head_dim + dims.qk_rope_head_dim
        check_is_tensor("query", query)
        widths: list[tuple[str, Tensor, tuple[int, ...]]] = [
            ("query", query, (heads, key)),
            ("latent", latent, (dims.kv_lora_rank,)),
            ("rope", rope, (dims.qk_rope_head_dim,)),
        ]
        if output is not None:
            widths.append(("output", output, (heads, dims.v_head_dim)))
        for name, tensor, tail in widths:
            check_rows(name, tensor, num_tokens, tail, spec.dtype, query.device)
        if lse is not None:
            self._check_lse(lse, len(query), query.device)

    def check_cache(
        self, kv_cache: Tensor | None, device: torch.device
    ) -> tuple[Tensor, AttentionSpec]:
        """Return the cache and its format; shape and dtype are for `AttentionSpec.split` to check.

        Raises:
            InvalidInputError: as said.
        """
        spec = self.spec.kv_cache_spec
        if not isinstance(spec, AttentionSpec):
            raise InvalidInputError.for_argument("kv_cache_spec", spec, "an AttentionSpec")
        if kv_cache is None:
            raise InvalidInputError.for_argument(
                "kv_cache", None, f"the layer's cache with attn_type={self.spec.attn_type}"
            )
        check_is_tensor("kv_cache", kv_cache)
        if kv_cache.device != device:
            raise InvalidInputError.for_argument(
                "kv_cache device", kv_cache.device, f"{device}, the query's"
            )
        return kv_cache, spec

    def check_decode(
        self,
        layer: AttentionLayer,
        query: Tensor,
        kv_cache: Tensor,
        metadata: object,
        output: Tensor | None,
        lse: Tensor | None,
    ) -> tuple[Tensor, MLAAttentionSpec]:
        """Return the output and the cache's format of a call of `forward_mqa`.

        Args:
            layer: as in `check_decode_inputs`, like every argument that is not listed here.
            query: as there.
            kv_cache: as there.
            metadata: as there.
            output: (T, H, kv_lora_rank); None: it is made, with zeros behind the decodes.
            lse: as there.

        Raises:
            InvalidInputError: as `check_decode_inputs`.
            UnsupportedOptionError: likewise.
        """
        spec = self.check_decode_inputs(layer, query, kv_cache, metadata, output, lse)
        if output is None:
            shape = (len(query), self.spec.num_heads, self.spec.head_size_v)
            output = query.new_empty(shape)
            decoded = require_mla_metadata(metadata).num_decode_tokens
            if decoded < len(query):  # two operations of torch
                output[decoded:].zero_()
        return output, spec

    def check_decode_inputs(
        self,
        layer: AttentionLayer,
        query: Tensor,
        kv_cache: Tensor,
        metadata: object,
        output: Tensor | None,
        lse: Tensor | None,
    ) -> MLAAttentionSpec:
        """Return the cache's format of a call of `forward_mqa`, for kernels that make the output.

        Args:
            layer: the calling layer.
            query: (T, H, latent_size).
            kv_cache: (num_blocks, block_size, latent_size).
            metadata: this step's, an `MLAMetadata`.
            output: (T, H, kv_lora_rank), or None.
            lse: (H, T), or None.

        Raises:
            InvalidInputError: an argument does not fit the layer or the metadata.
            UnsupportedOptionError: the layer has no cache of latents, or an option that it was not
                built with.
        """
        num_tokens = require_mla_metadata(metadata).num_decode_tokens
        self.check_tensors(query, output, lse, num_tokens)
        self.check_layer(layer, query.device)
        spec = self.spec.kv_cache_spec
        if not isinstance(spec, MLAAttentionSpec):
            raise UnsupportedOptionError("this layer has no cache of latents.")
        check_is_tensor("kv_cache", kv_cache)
        if kv_cache.device != query.device:
            raise InvalidInputError.for_argument(
                "kv_cache device", kv_cache.device, f"{query.device}, the query's"
            )
        spec.check(kv_cache)
        return spec

    def check_keys(
        self,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor | None,
        device: torch.device,
        num_keys: int,
    ) -> tuple[Tensor, Tensor]:
        """Return key and value of a cache-free call.

        Args:
            key: (at least num_keys, Hkv, D).
            value: (at least num_keys, Hkv, Dv).
            kv_cache: None.
            device: the query's.
            num_keys: keys that the metadata describes.

        Raises:
            InvalidInputError: a cache is given, or keys or values are missing or do not fit.
        """
        spec = self.spec
        if kv_cache is not None:
            raise InvalidInputError.for_argument(
                "kv_cache", f"a tensor {tuple(kv_cache.shape)}", f"None with {spec.attn_type}"
            )
        return (
            self._checked_rows("key", key, spec.head_size, device, num_keys),
            self._checked_rows("value", value, spec.head_size_v, device, num_keys),
        )

    def check_written_keys(
        self, key: Tensor | None, value: Tensor | None, device: torch.device
    ) -> None:
        """Refuse keys and values that cannot be those which the cache holds already.

        A call with a cache may hand over the step's keys, (any, Hkv, D), and values, or neither.

        Raises:
            InvalidInputError: one of them alone is given, or they do not fit.
        """
        if key is None and value is None:
            return
        if key is None or value is None:
            raise InvalidInputError.for_argument(
                "key" if key is None else "value", None, "a tensor where the other is one"
            )
        self._checked_rows("key", key, self.spec.head_size, device, 0)
        self._checked_rows("value", value, self.spec.head_size_v, device, 0)

    def _checked_rows(
        self, name: str, tensor: Tensor | None, width: int, device: torch.device, num_keys: int
    ) -> Tensor:
        heads, shape = self.spec.num_kv_heads, None
        if tensor is not None:
            check_is_tensor(name, tensor)
            shape = tensor.shape
            is_of_layer = len(shape) == 3 and shape[1] == heads and shape[2] == width
            if is_of_layer and shape[0] >= num_keys:
                check_like(name, tensor, self.spec.dtype, device)
                return tensor
        raise InvalidInputError.for_argument(
            f"{name} shape",
            None if shape is None else tuple(shape),
            f"(at least {num_keys}, {heads}, {width}) with {self.spec.attn_type}",
        )

    def check_layer(self, layer: AttentionLayer, device: torch.device) -> None:
        """Refuse a layer object that carries other options than its description says.

        Raises:
            InvalidInputError: sinks or slopes are missing, or have another shape, dtype or place;
                a scale is not positive or of no such shape.
            UnsupportedOptionError: sinks, slopes or scales are given that would be dropped.
        """
        spec, key_scale, value_scale = self.spec, layer.k_scale, layer.v_scale
        if spec.has_sinks or layer.sinks is not None:
            self._check_per_head("sinks", layer.sinks, spec.has_sinks, device)
        if spec.has_alibi or layer.alibi_slopes is not None:
            self._check_per_head("alibi_slopes", layer.alibi_slopes, spec.has_alibi, device)
        right_key, right_value = self._right_scales
        if key_scale is right_key and value_scale is right_value:
            return  # the very objects of the last call; of tensors the form alone is looked at
        self._check_scale("k_scale", key_scale)
        self._check_scale("v_scale", value_scale)
        self._right_scales = (key_scale, value_scale)

    def _check_per_head(
        self, name: str, values: Tensor | None, is_expected: bool, device: torch.device
    ) -> None:
        flag = "has_alibi" if name == "alibi_slopes" else "has_sinks"
        if values is None:
            raise InvalidInputError.for_argument(
                f"layer.{name}", None, f"a tensor ({self.spec.num_heads},) with {flag}=True"
            )
        if not is_expected:
            raise UnsupportedOptionError(
                f"layer.{name} is given, but the layer was described with {flag}=False.",
                hint=f"build the layer's spec with {flag}=True.",
            )
        check_shape(f"layer.{name}", values, (self.spec.num_heads,))
        check_like(f"layer.{name}", values, torch.float32, device)

    def _check_scale(self, name: str, scale: float | Tensor) -> None:
        """Hold a scale to the cache's format; contents are read once, and on the host only."""
        if self._takes_scales:
            check_scale_form(f"layer.{name}", scale, self.spec.num_kv_heads)
            return
        if self._is_one(name, scale):
            return
        cache = self.spec.kv_cache_spec
        raise UnsupportedOptionError(
            f"layer.{name}={scale} with a cache that has no such scale"
            f" (kv_cache_dtype={getattr(cache, 'kv_cache_dtype', 'auto')}).",
            hint="a scale belongs to an fp8 cache; leave it at 1.0 here.",
        )

    def _is_one(self, name: str, scale: float | Tensor) -> bool:
        if not isinstance(scale, Tensor):
            return scale == 1.0
        if self._seen_scales.get(name) is scale or scale.device.type != "cpu":
            return True
        if bool((scale == 1.0).all()):
            self._seen_scales[name] = scale
            return True
        return False
