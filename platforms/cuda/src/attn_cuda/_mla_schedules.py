"""A schedule that the first layer's call makes and the others read, eagerly and in graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import torch

__all__ = ["Schedules"]

S = TypeVar("S")


class Schedules(Generic[S]):
    """The schedules of one step, for libraries that fill them in their first call.

    What a schedule holds follows from lengths on the device, so that a captured graph has to make
    it anew at every replay: the first call inside each capture gets an empty one, and the kernel
    that fills it is captured with the call. A call that a layer makes for the second time begins
    another capture.
    """

    def __init__(self, make: Callable[[], S]) -> None:
        """Keep what returns an empty schedule."""
        self._make = make
        self._eager: S | None = None
        self._captured: S | None = None
        self._callers: set[int] = set()

    def renew(self) -> None:
        """Forget the schedule of eager calls: the lengths are others now."""
        self._eager = None

    def of(self, caller: object, device: torch.device) -> S:
        """Return the schedule for a layer's call.

        Args:
            caller: the layer's implementation.
            device: where the call runs.
        """
        if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
            if self._eager is None:
                self._eager = self._make()
            return self._eager
        if self._captured is None or id(caller) in self._callers:
            self._captured = self._make()
            self._callers.clear()
        self._callers.add(id(caller))
        return self._captured
