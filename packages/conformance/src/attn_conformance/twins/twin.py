"""What a broken twin is: the reference backend with one thing wrong."""

from __future__ import annotations

from typing import ClassVar

from attn_conformance.reference_backend import ReferenceBackend

__all__ = ["Broken", "Twin"]


class Broken:
    """What every twin says of itself.

    Class attributes:
        breaks: the rules that must catch it, each by itself.
        raises: the fault is that it raises; with every other twin an error that is no violation
            is a mistake of the twin.
        ends_process: it hangs or kills its process, so that it is run in one of its own. Every
            case of its rules that is not in `fails` must pass all the same.
        fails: names of the cases that such a twin fails in.
        needs_cuda: only a CUDA device can show the fault.
    """

    breaks: ClassVar[tuple[str, ...]] = ()
    raises: ClassVar[bool] = False
    ends_process: ClassVar[bool] = False
    fails: ClassVar[tuple[str, ...]] = ()
    needs_cuda: ClassVar[bool] = False


class Twin(Broken, ReferenceBackend):
    """A backend that is right but for one thing, which its docstring names."""

    name = "CONFORMANCE_TWIN"
