"""Between rows of equal length with padding, which models hold, and real tokens, which kernels take."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["Tokens", "has_gap"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tokens:
    """The real tokens among B rows of `width` places.

    Attributes:
        lengths: (B,) real tokens of each row.
        width: places per row.
        places: (N,) int64 on the device: place of each real token, row * width + column; None
            where every place holds one.
    """

    lengths: tuple[int, ...]
    width: int
    places: torch.Tensor | None

    @classmethod
    def all_of(cls, batch_size: int, width: int) -> Tokens:
        """Return the tokens of rows without padding."""
        return cls(lengths=(width,) * batch_size, width=width, places=None)

    @classmethod
    def where(cls, is_real: torch.Tensor, device: torch.device) -> Tokens:
        """Return the tokens of a (B, width) bool mask on the host."""
        batch_size, width = is_real.shape
        lengths = tuple(is_real.sum(1).tolist())
        if all(length == width for length in lengths):
            return cls.all_of(batch_size, width)
        places = is_real.flatten().nonzero().squeeze(1)
        return cls(lengths=lengths, width=width, places=places.to(device))

    @property
    def count(self) -> int:
        """Real tokens in all (N)."""
        return sum(self.lengths)

    def gather(self, states: torch.Tensor) -> torch.Tensor:
        """Return the real tokens (N, H, D) of states (B, H, at least width, D)."""
        flat = states[:, :, : self.width].transpose(1, 2).flatten(0, 1)
        return flat if self.places is None else flat[self.places]

    def scatter(self, output: torch.Tensor) -> torch.Tensor:
        """Return (B, width, H, D) of outputs (N, H, D); padding gets zeros."""
        rows = (len(self.lengths), self.width)
        if self.places is None:
            return output.unflatten(0, rows)
        padded = output.new_zeros((rows[0] * rows[1], *output.shape[1:]))
        padded[self.places] = output
        return padded.unflatten(0, rows)


def has_gap(is_real: torch.Tensor) -> bool:
    """Whether padding separates real tokens of a row: (B, width) bool on the host.

    A window counts padding in transformers; where none lies between real tokens, counting real
    ones is the same.
    """
    starts = is_real[:, 1:] & ~is_real[:, :-1]
    return bool((starts.sum(1) + is_real[:, :1].sum(1) > 1).any())
