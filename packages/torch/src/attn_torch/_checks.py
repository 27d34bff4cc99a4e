"""What a call of `forward` must fulfil, checked on shapes, dtypes and places before any kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from attn_shared.backend import AttentionLayer
from attn_shared.errors import InvalidInputError, UnsupportedOptionError
from attn_shared.kv_cache import AttentionSpec
from attn_shared.spec import LayerSpec

__all__ = ["CallChecker"]


class CallChecker:
    """Checks the calls of one layer. It costs some microseconds and never synchronises a device."""

    def __init__(self, spec: LayerSpec) -> None:
        """Keep what every call of a layer of this description must fulfil."""
        cache = spec.kv_cache_spec
        self.spec = spec
        self._takes_scales = (
            isinstance(cache, AttentionSpec) and cache.is_quantized and not cache.has_inline_scales
        )
        # Scale tensors on the host whose contents were found to be 1.
        self._seen_scales: dict[str, Tensor] = {}

    def check_tensors(
        self, query: Tensor, output: Tensor | None, lse: Tensor | None, num_tokens: int
    ) -> None:
        """Refuse a query, output or LSE of another layer or of another batch.

        Args:
            query: (T, Hq, D).
            output: (T, Hq, Dv), or None.
            lse: (Hq, T), or None.
            num_tokens: rows that the metadata describes; T is at least as many.

        Raises:
            InvalidInputError: names the argument, its value and what is allowed.
        """
        spec = self.spec
        if query.ndim != 3 or query.shape[1] != spec.num_heads or query.shape[2] != spec.head_size:
            raise InvalidInputError.for_argument(
                "query shape", tuple(query.shape), f"(T, {spec.num_heads}, {spec.head_size})"
            )
        rows = query.shape[0]
        if rows < num_tokens:
            raise InvalidInputError.for_argument(
                "query rows",
                rows,
                f"at least {num_tokens}, the tokens that the metadata describes",
                hint="pass the metadata that was built for this batch.",
            )
        _check_like("query", query, spec.dtype, query.device)
        if output is not None:
            _check_shape("output", output, (rows, spec.num_heads, spec.head_size_v))
            _check_like("output", output, spec.dtype, query.device)
        if lse is not None:
            _check_shape("lse", lse, (spec.num_heads, rows))
            _check_like("lse", lse, torch.float32, query.device)

    def check_cache(
        self, kv_cache: Tensor | None, device: torch.device
    ) -> tuple[Tensor, AttentionSpec]:
        """Return the cache and its format; shape and dtype are for `AttentionSpec.split` to check.

        Raises:
            InvalidInputError: as said.
        """
        spec = self.spec.kv_cache_spec
        if kv_cache is None or not isinstance(spec, AttentionSpec):
            raise InvalidInputError.for_argument(
                "kv_cache",
                None,
                f"the layer's cache with attn_type={self.spec.attn_type}",
            )
        if kv_cache.device != device:
            raise InvalidInputError.for_argument(
                "kv_cache device", kv_cache.device, f"{device}, the query's"
            )
        return kv_cache, spec

    def check_keys(
        self,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor | None,
        device: torch.device,
        num_keys: int,
    ) -> tuple[Tensor, Tensor]:
        """Return key and value of a cache-free call.

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

    def _checked_rows(
        self, name: str, tensor: Tensor | None, width: int, device: torch.device, num_keys: int
    ) -> Tensor:
        tail = (self.spec.num_kv_heads, width)
        if tensor is None or tensor.shape[1:] != tail or tensor.shape[0] < num_keys:
            raise InvalidInputError.for_argument(
                f"{name} shape",
                None if tensor is None else tuple(tensor.shape),
                f"(at least {num_keys}, {tail[0]}, {tail[1]}) with {self.spec.attn_type}",
            )
        _check_like(name, tensor, self.spec.dtype, device)
        return tensor

    def check_layer(self, layer: AttentionLayer, device: torch.device) -> None:
        """Refuse a layer object that carries other options than its description says.

        Raises:
            InvalidInputError: sinks or slopes are missing, or have another shape or place.
            UnsupportedOptionError: sinks, slopes or scales are given that would be dropped.
        """
        spec = self.spec
        if spec.has_sinks or layer.sinks is not None:
            self._check_per_head("sinks", layer.sinks, spec.has_sinks, device)
        if spec.has_alibi or layer.alibi_slopes is not None:
            self._check_per_head("alibi_slopes", layer.alibi_slopes, spec.has_alibi, device)
        self._check_scale("k_scale", layer.k_scale)
        self._check_scale("v_scale", layer.v_scale)

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
        _check_shape(f"layer.{name}", values, (self.spec.num_heads,))
        if values.device != device:
            raise InvalidInputError.for_argument(
                f"layer.{name} device", values.device, f"{device}, the query's"
            )

    def _check_scale(self, name: str, scale: float | Tensor) -> None:
        """Hold a scale to the cache's format; contents are read once, and on the host only."""
        if self._takes_scales:
            if isinstance(scale, Tensor) and scale.numel() not in (1, self.spec.num_kv_heads):
                raise InvalidInputError.for_argument(
                    f"layer.{name} shape",
                    tuple(scale.shape),
                    f"one element or ({self.spec.num_kv_heads},)",
                )
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


def _check_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise InvalidInputError.for_argument(f"{name} shape", tuple(tensor.shape), str(shape))


def _check_like(name: str, tensor: Tensor, dtype: torch.dtype, device: torch.device) -> None:
    if tensor.dtype is not dtype:
        raise InvalidInputError.for_argument(f"{name} dtype", tensor.dtype, str(dtype))
    if tensor.device != device:
        raise InvalidInputError.for_argument(
            f"{name} device", tensor.device, f"{device}, the query's"
        )
