"""Scales of an fp8 cache as FlashInfer's wrappers take them: numbers of the host."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from attn_shared.errors import UnsupportedOptionError
from attn_shared.impl import AttentionLayer

__all__ = ["PLAIN", "Scales", "Scaling", "lift_of", "scaling_of"]

_LEAST_EXPONENT = -8  # of the logits' factor: hidden logits are then 195 below 0
_USUAL_EXPONENT = -4  # of that of heads of 128 without scales
_LEAST_IN_FLOAT16 = 2.0**-12  # below, a query would lose more than its own rounding


def lift_of(scale: float, k_scale: float, dtype: torch.dtype) -> float:
    """Return the power of two that leaves the query and joins the factor of the logits.

    The kernels "fa2" and "fa3" hide a logit by -50000, before they multiply by scale * k_scale, so
    that by a small factor what is hidden counts: at 2e-6, that of an e5m2 cache whose scale is
    2^-16, each hidden key weighs e^-0.1 (met on an H200). By a power of two the product stays the
    same to the last bit.

    Args:
        scale: of the layer's logits, positive.
        k_scale: of the stored keys.
        dtype: of the query.

    Raises:
        UnsupportedOptionError: a float16 query would have to be so small that it loses digits.
    """
    exponent = math.frexp(scale * k_scale)[1] - 1
    if exponent >= _LEAST_EXPONENT:
        return 1.0
    lift = 2.0 ** (exponent - _USUAL_EXPONENT)
    if dtype is torch.float16 and lift < _LEAST_IN_FLOAT16:
        least = _LEAST_IN_FLOAT16 * 2.0**_USUAL_EXPONENT / scale
        raise UnsupportedOptionError(
            f"layer.k_scale={k_scale} with scale={scale} in torch.float16 is not served: "
            f"FlashInfer's kernels hide logits by -50000; allowed: k_scale from {least:.1e}.",
            hint="take a layer in bfloat16, or a cache whose scale is larger.",
        )
    return lift


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """The numbers of a layer's scales, and what becomes of them in a wrapper's `run`.

    Attributes:
        k_scale, v_scale: of a quantised cache.
        q_scale: of a query that is quantised beside it.
        lift: a power of two by which planned kernels get a smaller query and a larger `k_scale`;
            1.0 where the factor of their logits is large enough as it is.
        options: keywords of a wrapper's `run`, `lift` in them; none where all are 1.
    """

    k_scale: float = 1.0
    v_scale: float = 1.0
    q_scale: float = 1.0
    lift: float = 1.0
    options: Mapping[str, float] = field(init=False)

    def __post_init__(self) -> None:
        """Work out `options`."""
        k_scale = self.k_scale / self.lift
        is_plain = k_scale == self.v_scale == 1.0
        options = {} if is_plain else {"k_scale": k_scale, "v_scale": self.v_scale}
        object.__setattr__(self, "options", options)


PLAIN = Scaling()
"""That of a cache without scales, by a factor of the usual size."""


def scaling_of(
    scale: float, dtype: torch.dtype, k_scale: float, v_scale: float, q_scale: float
) -> Scaling:
    """Return what becomes of a layer's scales.

    Args:
        scale: of its logits, positive.
        dtype: of its query.
        k_scale: of the stored keys.
        v_scale: of the stored values.
        q_scale: of a query that is quantised beside them.

    Raises:
        UnsupportedOptionError: see `lift_of`.
    """
    lift = lift_of(scale, k_scale, dtype)
    return Scaling(k_scale=k_scale, v_scale=v_scale, q_scale=q_scale, lift=lift)


class Scales:
    """The numbers of one layer's scales.

    The wrappers fold them into the scale of the logits and multiply the output, on the host. So a
    tensor is read once, when it is first seen or was written since; that waits for the device,
    which a capture must not: run the layer once before.
    """

    def __init__(self, backend: str) -> None:
        """Know none.

        Args:
            backend: its name, for messages.
        """
        self._backend = backend
        self._seen: dict[str, tuple[Tensor, int, float]] = {}

    def of(self, layer: AttentionLayer) -> tuple[float, float, float]:
        """Return (k_scale, v_scale, q_scale).

        Raises:
            UnsupportedOptionError: a scale per head, or a tensor first seen within a capture.
        """
        key, value, query = layer.k_scale, layer.v_scale, layer.q_scale
        return (
            self._number("k_scale", key),
            self._number("v_scale", value),
            self._number("q_scale", query),
        )

    def _number(self, name: str, scale: float | Tensor) -> float:
        if not isinstance(scale, Tensor):
            return float(scale)
        version = 0 if scale.is_inference() else scale._version
        seen = self._seen.get(name)
        if seen is not None and seen[0] is scale and seen[1] == version:
            return seen[2]
        if scale.numel() != 1:
            raise UnsupportedOptionError(
                f"layer.{name} of shape {tuple(scale.shape)} is not served by {self._backend}; "
                "allowed: one number for all heads.",
                hint="select with per_head_quant_scales=True.",
            )
        if scale.is_cuda and torch.cuda.is_current_stream_capturing():
            raise UnsupportedOptionError(
                f"layer.{name} is a tensor that {self._backend} has not read before this capture.",
                hint="run the layer once before it is captured, or give the scale as a number.",
            )
        number = float(scale)
        self._seen[name] = (scale, version, number)
        return number
