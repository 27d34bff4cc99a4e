"""Scales of an fp8 cache as AITER reads them: one float32 on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from attn_shared.errors import UnsupportedOptionError

__all__ = ["Scales"]


class Scales:
    """Makes a tensor of a number once, and looks at a tensor without a copy."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[float, torch.device], Tensor] = {}

    def of(self, scale: float | Tensor, device: torch.device) -> Tensor:
        """Return a scale as float32 (1,).

        Args:
            scale: a number, or a tensor of one.
            device: of the cache.

        Raises:
            UnsupportedOptionError: it has a number per head.
        """
        if isinstance(scale, Tensor):
            if scale.numel() != 1:
                raise UnsupportedOptionError(
                    f"a scale of shape {tuple(scale.shape)} is given; allowed: one number, for "
                    "AITER's kernels read one of a whole cache."
                )
            return scale.to(device=device, dtype=torch.float32).reshape(1)
        key = (float(scale), device)
        if key not in self._numbers:
            self._numbers[key] = torch.full((1,), key[0], dtype=torch.float32, device=device)
        return self._numbers[key]
