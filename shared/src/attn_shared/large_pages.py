"""Host memory in large pages, which processors translate with fewer misses."""

from __future__ import annotations

import ctypes
import mmap

import torch

__all__ = ["advise_large_pages"]

_LEAST_BYTES = 4 * 2**20  # holds a whole page of 2 MiB wherever it begins


def advise_large_pages(tensor: torch.Tensor) -> bool:
    """Ask the operating system to back a tensor's memory by large pages.

    Pages are made when they are first written, so that this has to come before; memory that the
    process has used already stays as it is. It is advice: where the system follows none (its
    /sys/kernel/mm/transparent_hugepage/enabled says "never", or it is not Linux), nothing changes.

    Args:
        tensor: not written yet, contiguous.

    Returns:
        Whether the system took the advice: of memory on a CPU, of 4 MiB or more.
    """
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    num_bytes = tensor.numel() * tensor.element_size()
    # A fake tensor says that it is on a CPU, and has no memory.
    has_memory = tensor.device.type == "cpu" and type(tensor) is torch.Tensor
    if advice is None or not has_memory or num_bytes < _LEAST_BYTES:
        return False
    start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    length = tensor.data_ptr() + num_bytes - start
    libc = ctypes.CDLL(None)
    return bool(libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), advice) == 0)
