"""What a broken twin is: the reference backend with one thing wrong."""

from __future__ import annotations

from typing import ClassVar

from attn_conformance.reference_backend import ReferenceBackend

__all__ = ["Twin"]


class Twin(ReferenceBackend):
    """A backend that is right but for one thing.

    Class attributes:
        breaks: the rules that must catch it.
        needs_cuda: the fault can be seen on a CUDA device only.
    """

    name = "CONFORMANCE_TWIN"
    breaks: ClassVar[tuple[str, ...]] = ()
    needs_cuda: ClassVar[bool] = False
