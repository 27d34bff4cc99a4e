"""Who writes keys and values into the cache: a Triton kernel on a GPU, torch elsewhere."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable

from attn_shared.device import DeviceFacts
from attn_shared.kv_write import write_kv

__all__ = ["kv_writer"]

_TRITON_WRITER = "attn_triton.kv_write"


def kv_writer(device: DeviceFacts) -> tuple[Callable[..., None], str]:
    """Return the function that writes a step's keys and values, and its name.

    Args:
        device: where the layer was selected for; of a simulated one tensors are on the host.
    """
    if device.is_simulated or importlib.util.find_spec("triton") is None:
        return write_kv, "torch"
    return importlib.import_module(_TRITON_WRITER).write_kv, "triton"
