"""FlashInfer's import, which would start CUDA in this process, told what it would ask for."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType

from attn_shared.device import DeviceFacts
from attn_shared.probing import import_library
from attn_shared.torch_build import Runtime, is_running

__all__ = ["library"]

_NAME = "flashinfer"
_ARCHITECTURES = "FLASHINFER_CUDA_ARCH_LIST"


def library(module: str = _NAME) -> ModuleType:
    """Import FlashInfer, or a module of it.

    While it is imported it asks torch for the capability of every GPU, to know what to compile for.
    That starts CUDA, and a process that has only selected a backend could not be forked any more.
    So its variable says it meanwhile, where nobody has set that, from what NVML says.

    Raises:
        ImportError: with the library's own words.
    """
    if module in sys.modules:
        return sys.modules[module]
    with _told():
        return import_library(module)


@contextmanager
def _told() -> Iterator[None]:
    if _NAME in sys.modules or _ARCHITECTURES in os.environ or is_running(Runtime.CUDA):
        yield
        return
    from attn_cuda.platform import CudaPlatform  # which names this library among its own

    found = _capabilities(CudaPlatform().devices())
    if found:
        os.environ[_ARCHITECTURES] = found
    try:
        yield
    finally:
        if found:  # what it compiles for later it asks again then
            os.environ.pop(_ARCHITECTURES, None)


def _capabilities(devices: Iterable[DeviceFacts]) -> str:
    """Return "9.0 10.0", each capability once."""
    known = {device.capability for device in devices if device.capability is not None}
    return " ".join(f"{item.major}.{item.minor}" for item in sorted(known))
