"""Kernels that are noted instead of compiled, for compiling all of them side by side."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

__all__ = ["PendingHandle", "is_noting", "line_of", "note", "noted_by"]

_NOTERS: list[Callable[[str], None]] = []
"""Who is told of kernels, the innermost last."""


@contextmanager
def noted_by(noter: Callable[[str], None]) -> Iterator[None]:
    """Tell of each kernel that is about to be compiled in this process, and launch none.

    Args:
        noter: is given a kernel's line.
    """
    _NOTERS.append(noter)
    try:
        yield
    finally:
        _NOTERS.pop()


def is_noting() -> bool:
    """Whether somebody is told."""
    return bool(_NOTERS)


def note(
    kernel: Any,
    kinds: Mapping[str, tuple[str, bool]],
    constants: Mapping[str, object],
    options: Mapping[str, object],
) -> None:
    """Tell of a kernel; see `line_of`."""
    _NOTERS[-1](line_of(kernel, kinds, constants, options))


def line_of(
    kernel: Any,
    kinds: Mapping[str, tuple[str, bool]],
    constants: Mapping[str, object],
    options: Mapping[str, object],
) -> str:
    """Return all that a kernel's machine code depends on, but for the GPU, as a line of JSON.

    Args:
        kernel: a function under `triton.jit`, by a name of its module.
        kinds: type and alignment of its run-time arguments.
        constants: values of its constexpr parameters.
        options: of the compiler.
    """
    parts = {
        "kernel": f"{kernel.fn.__module__}:{kernel.fn.__name__}",
        "kinds": {name: tuple(kind) for name, kind in kinds.items()},
        "constants": dict(constants),
        "options": dict(options),
    }
    return json.dumps(parts, sort_keys=True)


class PendingHandle:
    """Stands for the handle of a kernel that was noted; compiles it where it is launched after.

    Args:
        make: returns the handle.
        device_index: where it runs.
    """

    __slots__ = ("_handle", "_make", "device_index")

    def __init__(self, make: Callable[[], Any], device_index: int) -> None:
        self._make = make
        self._handle: Any = None
        self.device_index = device_index

    def __call__(self, grid: tuple[int, int, int], *args: object) -> None:
        """Launch as `launch.Handle` does; nothing while kernels are noted."""
        if is_noting():
            return
        if self._handle is None:
            self._handle = self._make()
        self._handle(grid, *args)
