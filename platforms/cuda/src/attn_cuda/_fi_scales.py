"""Scales of an fp8 cache as FlashInfer's wrappers take them: numbers of the host."""

from __future__ import annotations

import torch
from torch import Tensor

from attn_shared.errors import UnsupportedOptionError
from attn_shared.impl import AttentionLayer

__all__ = ["Scales"]


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
