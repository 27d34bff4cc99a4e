"""Keys and values of a cache as rows, for calls that do not read pages, or not so far.

The paged prefill kernel loads by 32-bit offsets from the cache's address. Where a cache is larger,
or lies so that its address and an offset do not add up in 32 bits, releases have read other pages,
or zeros, without a word (ROCm/aiter#2517, #2608, #3824). Such a cache is gathered instead.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attn_rocm._aiter_steps import KeyPlaces
from attn_shared.quantization import FP8_DTYPES

__all__ = ["gathered", "is_in_reach"]

_REACH = 2**31
_LOW = 2**32


def is_in_reach(view: Tensor) -> bool:
    """Whether the paged prefill kernel reads every page of K or V (P, S, Hkv, D) rightly."""
    strides = zip(view.shape, view.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in strides)
    span = (last + 1) * view.element_size()
    if span > _REACH:
        return False
    is_on_device = view.device.type != "cpu"
    return not is_on_device or view.data_ptr() % _LOW + span <= _LOW


def gathered(view: Tensor, places: KeyPlaces, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the rows (N, Hkv, D) of K or V.

    Args:
        view: (P, S, Hkv, D).
        places: of the rows.
        scale: of stored fp8, float32 (1,); None where nothing is to be scaled.
        dtype: of the rows.
    """
    if view.dtype not in FP8_DTYPES:
        return view[places.blocks, places.offsets]
    stored = view.view(torch.uint8)[places.blocks, places.offsets].view(view.dtype)
    rows = stored.to(torch.float32)
    return (rows if scale is None else rows * scale).to(dtype)
