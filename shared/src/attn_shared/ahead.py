"""Kernels that a library compiles at their first use, and how to have them compiled before."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager
from typing import Protocol

__all__ = ["KernelCompiler"]


class KernelCompiler(Protocol):
    """What a backend's library compiles at first use, found and compiled ahead.

    Run what will be run within `noting`: a call whose kernels are missing raises there, and what it
    lacks is noted. `compile` then makes all that was noted, side by side. A call may lack more than
    one module and finds them one after the other, so that both are done until nothing is noted.
    """

    def noting(self) -> AbstractContextManager[Collection[str]]:
        """Note what is missing instead of compiling it; yields its names, as they are found."""

    def compile(self, jobs: int) -> None:
        """Compile what was noted, and forget it.

        Args:
            jobs: files that are compiled side by side.

        Raises:
            VendorMissingError: it does not compile, in the compiler's own words.
        """
