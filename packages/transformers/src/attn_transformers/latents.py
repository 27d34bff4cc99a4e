"""Layers of multi-head latent attention (DeepSeek-V2, V3) over a `PagedCache` of latents.

Such a model hands its cache a token's latent and rope part, expands what the cache gives back to
all heads, and calls the attention function with that. The note on the latents is lost on the way;
it is found by the module, whose weight expands them, while they live.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch

from attn_shared.errors import UnsupportedOptionError
from attn_shared.mla import MLAAttention
from attn_shared.request import MLADims
from attn_transformers.layers import LayerKey
from attn_transformers.new_tokens import NewTokens, latest_note

__all__ = ["Latents", "latents_of", "mla_layer_for"]

_WIDTHS = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Latents:
    """What a layer put into the cache in this pass.

    Attributes:
        note: where it belongs.
        latent: (B, 1, T, kv_lora_rank).
        rope: (B, 1, T, qk_rope_head_dim).
        dims: widths of the layer.
        weight: (H * (qk_nope_head_dim + v_head_dim), kv_lora_rank).
    """

    note: NewTokens
    latent: torch.Tensor
    rope: torch.Tensor
    dims: MLADims
    weight: torch.Tensor


def latents_of(module: torch.nn.Module) -> Latents | None:
    """Return the latents that a module put into a `PagedCache`, and no attention got yet.

    None for modules of another kind, and where no such cache was handed anything.

    Raises:
        UnsupportedOptionError: the module expands latents by more than a weight.
    """
    projection = getattr(module, "kv_b_proj", None)
    if projection is None or not all(hasattr(module, name) for name in _WIDTHS):
        return None
    found = latest_note(getattr(module, "layer_idx", None))
    if found is None:
        return None
    note, latent, rope = found
    dims = MLADims(**{name: int(getattr(module, name)) for name in _WIDTHS})
    if (latent.shape[-1], rope.shape[-1]) != (dims.kv_lora_rank, dims.qk_rope_head_dim):
        return None
    if type(projection) is not torch.nn.Linear or projection.bias is not None:
        raise UnsupportedOptionError(
            f"kv_b_proj of layer {note.layer} is a {type(projection).__name__}"
            f"{' with a bias' if getattr(projection, 'bias', None) is not None else ''}; a "
            "PagedCache of latents takes a torch.nn.Linear without one.",
            hint="leave out the PagedCache for this model.",
        )
    return Latents(note=note, latent=latent, rope=rope, dims=dims, weight=projection.weight)


_LAYERS: weakref.WeakKeyDictionary[torch.nn.Module, dict[LayerKey, MLAAttention]] = (
    weakref.WeakKeyDictionary()
)


def mla_layer_for(key: LayerKey, module: torch.nn.Module, weight: torch.Tensor) -> MLAAttention:
    """Return the layer that runs a module, which reads the module's own weight.

    Args:
        key: the layer's kind.
        module: the attention module.
        weight: of its up-projection; another than before makes another layer.
    """
    own = _LAYERS.setdefault(module, {})
    found = own.get(key)
    if found is None or found.kv_b_proj is None or found.kv_b_proj.data_ptr() != weight.data_ptr():
        own[key] = found = key.build_mla(weight)
    return found
