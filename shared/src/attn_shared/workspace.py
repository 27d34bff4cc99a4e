"""Scratch memory that builders and implementations share, one per device and stream."""

from __future__ import annotations

import torch

from attn_shared.errors import InvalidInputError

__all__ = ["Workspace"]


class Workspace:
    """A byte buffer that grows until it is frozen.

    A captured graph replays addresses, so after `freeze` (called when capture begins) a request
    for more is an error instead of a new buffer.
    """

    def __init__(self, device: torch.device, *, num_bytes: int = 0) -> None:
        """Allocate `num_bytes` of zeros on `device`.

        Raises:
            InvalidInputError: `num_bytes` is negative.
        """
        _require_count(num_bytes)
        self._buffer = _zeros(num_bytes, device)
        self._is_frozen = False

    @property
    def device(self) -> torch.device:
        """The device of the buffer."""
        return self._buffer.device

    @property
    def num_bytes(self) -> int:
        """The buffer's present size."""
        return self._buffer.numel()

    def freeze(self) -> None:
        """Refuse growth from now on."""
        self._is_frozen = True

    def get(self, num_bytes: int) -> torch.Tensor:
        """Return a uint8 view (num_bytes,) of the buffer; its contents are unspecified.

        Views share their memory: whoever gets one uses it before the next `get`. A view that was
        taken before the buffer grew stays valid and is no longer shared.

        Raises:
            InvalidInputError: the buffer is frozen and too small, or `num_bytes` is negative.
        """
        _require_count(num_bytes)
        if num_bytes > self.num_bytes:
            self._grow(num_bytes)
        return self._buffer[:num_bytes]

    def _grow(self, num_bytes: int) -> None:
        if self._is_frozen:
            raise InvalidInputError.for_argument(
                "workspace request",
                f"{num_bytes} bytes",
                f"at most {self.num_bytes} bytes after graph capture began",
                hint="raise the bounds in BuildConfig and build before capturing.",
            )
        self._buffer = _zeros(num_bytes, self.device)


def _zeros(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Return a buffer that may be written outside inference mode as well, wherever it is made."""
    with torch.inference_mode(mode=False):
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)


def _require_count(num_bytes: int) -> None:
    if num_bytes < 0:
        raise InvalidInputError.for_argument("num_bytes", num_bytes, "an int >= 0")
