"""One rule for gradients: what asks for one gets a right one, or an error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch

from attn_shared.errors import UnsupportedOptionError

__all__ = ["refuse_gradients", "require_no_gradients"]

_TENSORS = ("sinks", "alibi_slopes", "kv_b_proj")  # of a layer, or None
_OF_LAYER = (*_TENSORS, "q_scale", "k_scale", "v_scale")  # scales may be numbers


def refuse_gradients(layer: Any, **tensors: object) -> None:
    """Refuse a call whose output would have to carry gradients that its backend does not compute.

    It looks at no contents, and at one flag of torch where gradients are off. While a graph is
    traced it leaves the layer's scales alone: it would be traced again for each of their values.

    Args:
        layer: the calling `Attention` or `MLAAttention`; its own tensors are looked at as well.
        tensors: arguments of the call by name; None and numbers ask for nothing.

    Raises:
        UnsupportedOptionError: names the tensor, the backend and what to do.
    """
    if not torch.is_grad_enabled():
        return
    asking = _asking(tensors) or _asking_of(layer)
    if asking is not None and not layer.impl.differentiates:
        _refuse(asking, str(layer.selection.chosen))


def require_no_gradients(name: str, tensors: Mapping[str, object]) -> None:
    """Refuse tensors that require a gradient while gradients are on.

    Args:
        name: of what computes none.
        tensors: by name; whatever is no tensor asks for nothing.

    Raises:
        UnsupportedOptionError: names the tensor and what to do.
    """
    asking = _asking(tensors) if torch.is_grad_enabled() else None
    if asking is not None:
        _refuse(asking, name)


def _asking(tensors: Mapping[str, object]) -> str | None:
    """Return the name of the first tensor that requires a gradient."""
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            return name
    return None


def _asking_of(layer: Any) -> str | None:
    """Return the name of the first tensor of a layer's own that requires a gradient."""
    for name in _TENSORS if torch.compiler.is_compiling() else _OF_LAYER:
        tensor = getattr(layer, name, None)
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            return f"the layer's {name}"
    return None


def _refuse(argument: str, name: str) -> NoReturn:
    raise UnsupportedOptionError(
        f"{argument} requires a gradient, and {name} computes none: attention here is for "
        "inference.",
        hint="call it inside torch.inference_mode() or torch.no_grad(), or detach the tensor.",
    )
