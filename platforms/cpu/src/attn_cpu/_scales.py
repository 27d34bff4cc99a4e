"""A layer's scales as the ops take them: tensors of one or of a number per kv head."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["ScaleTensors"]


class ScaleTensors:
    """Makes a tensor of a number once, and not at each call."""

    def __init__(self) -> None:
        """Start with none."""
        self._made: dict[float, Tensor] = {}

    def of(self, scale: float | Tensor) -> Tensor:
        """Return a scale as float32 (1,) or (Hkv,) on the host."""
        if isinstance(scale, Tensor):
            return scale.reshape(-1).float()
        made = self._made.get(scale)
        if made is None:
            made = self._made[scale] = torch.tensor([scale], dtype=torch.float32)
        return made
