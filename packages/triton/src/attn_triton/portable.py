"""What runs beside vendors' kernels, by Triton on a GPU, else by torch."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from attn_shared.device import DeviceFacts
from attn_shared.kv_write import write_kv
from attn_shared.merge import merge_attn_states
from attn_shared.page_lists import page_indices

__all__ = ["Portable", "portable_for"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Portable:
    """One set of kernels.

    Attributes:
        name: "triton" or "torch".
        write_kv: as `attn_shared.kv_write.write_kv`.
        merge: as `attn_shared.merge.merge_attn_states`.
        page_indices: as `attn_shared.page_lists.page_indices`.
    """

    name: str
    write_kv: Callable[..., None]
    merge: Callable[..., tuple[Tensor, Tensor]]
    page_indices: Callable[[Tensor, Tensor, int], Tensor]


def portable_for(device: DeviceFacts) -> Portable:
    """Return the kernels for a layer.

    Args:
        device: what the layer was selected for; of a simulated one tensors are on the host.
    """
    if device.is_simulated or importlib.util.find_spec("triton") is None:
        return Portable(
            name="torch", write_kv=write_kv, merge=merge_attn_states, page_indices=page_indices
        )
    return Portable(
        name="triton",
        write_kv=importlib.import_module("attn_triton.kv_write").write_kv,
        merge=importlib.import_module("attn_triton.merge").merge_attn_states,
        page_indices=importlib.import_module("attn_triton.page_lists").page_indices,
    )
