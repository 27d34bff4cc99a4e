"""Whether Triton can run kernels in this process."""

from __future__ import annotations

import triton
from triton.runtime import driver

__all__ = ["require_driver"]


def require_driver() -> None:
    """See that there is a device to run kernels on, or the interpreter.

    Raises:
        RuntimeError: Triton finds no active driver; in its own words.
    """
    if not triton.knobs.runtime.interpret:
        driver.active.get_current_target()
