"""Level Zero's loader, which the XPU runtime opens Intel's GPUs through; it is not initialised."""

from __future__ import annotations

import ctypes
import sys

__all__ = ["loader_problem"]

_LIBRARY_NAME = "ze_loader.dll" if sys.platform == "win32" else "libze_loader.so.1"


def loader_problem() -> str | None:
    """Say why the loader cannot be opened, and what to do; None if it can."""
    try:
        ctypes.CDLL(_LIBRARY_NAME)
    except OSError as error:
        return (
            f"Level Zero's loader cannot be opened ({error}): install Intel's GPU runtime "
            "(packages level-zero or libze1, and intel-level-zero-gpu or libze-intel-gpu1)"
        )
    return None
