"""What runs beside vendors' kernels, by Triton on a GPU, else by torch."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from attn_shared.device import DeviceFacts
from attn_shared.impl import MLAAttentionImpl
from attn_shared.kv_write import write_kv
from attn_shared.merge import merge_attn_states
from attn_shared.page_lists import page_indices

__all__ = ["LatentKernels", "Portable", "latent_kernels", "portable_for", "take_latent_kernels"]


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
    if not _has_triton(device):
        return Portable(
            name="torch", write_kv=write_kv, merge=merge_attn_states, page_indices=page_indices
        )
    return Portable(
        name="triton",
        write_kv=importlib.import_module("attn_triton.kv_write").write_kv,
        merge=importlib.import_module("attn_triton.merge").merge_attn_states,
        page_indices=importlib.import_module("attn_triton.page_lists").page_indices,
    )


class LatentKernels(NamedTuple):
    """What runs beside a decode over latents: hooks of `attn_shared.impl.MLAAttentionImpl`.

    Attributes:
        write_latents: as `attn_shared.kv_write.concat_and_cache_mla`.
        gather_latents: reads earlier entries.
        merge_into: as `attn_shared.merge.merge_into`.
    """

    write_latents: Callable[..., None]
    gather_latents: Callable[..., Tensor]
    merge_into: Callable[..., None]


def latent_kernels() -> LatentKernels:
    """Return Triton's."""
    return LatentKernels(
        write_latents=importlib.import_module("attn_triton.latent_write").concat_and_cache_mla,
        gather_latents=importlib.import_module("attn_triton.latent_gather").gather_latents,
        merge_into=importlib.import_module("attn_triton.merge").merge_into,
    )


def take_latent_kernels(impl: MLAAttentionImpl[Any], device: DeviceFacts) -> None:
    """Have a vendor's layer write, gather and merge by Triton where `portable_for` would.

    Args:
        impl: of the layer.
        device: what the layer was selected for.
    """
    if _has_triton(device):
        impl.write_latents, impl.gather_latents, impl.merge_into = latent_kernels()


def _has_triton(device: DeviceFacts) -> bool:
    return not device.is_simulated and importlib.util.find_spec("triton") is not None
