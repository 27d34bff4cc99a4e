"""Tensors of a step at addresses that captured graphs may hold."""

from __future__ import annotations

import torch
from torch import Tensor

from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.spec import BuildConfig

__all__ = ["Buffers", "is_captured"]


def is_captured(common: CommonAttentionMetadata, config: BuildConfig) -> bool:
    """Whether graphs are captured for batches of this size."""
    return not {common.num_actual_tokens, common.num_reqs}.isdisjoint(config.capture_sizes)


class Buffers:
    """One tensor for each name and size where they are kept, a new one each time otherwise."""

    def __init__(self, device: torch.device, *, is_kept: bool) -> None:
        self._device = device
        self._is_kept = is_kept
        self._kept: dict[tuple[str, int], Tensor] = {}

    def of(self, name: str, size: int, dtype: torch.dtype) -> Tensor:
        """Return a tensor (size,), its contents not set."""
        if not self._is_kept:
            return torch.empty(size, dtype=dtype, device=self._device)
        key = (name, size)
        if key not in self._kept:
            self._kept[key] = torch.empty(size, dtype=dtype, device=self._device)
        return self._kept[key]

    def kept(self, name: str, made: Tensor) -> Tensor:
        """Return a tensor (n,) as it is, or its contents at the address of its name and size."""
        if not self._is_kept:
            return made
        return self.of(name, made.shape[0], made.dtype).copy_(made)
