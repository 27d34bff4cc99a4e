"""One rule for gradients: what asks for one gets a right one, or an error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch.autograd import forward_ad

from attn_shared.errors import UnsupportedOptionError

__all__ = ["OwnScales", "is_differentiating", "refuse_gradients", "require_no_gradients"]

_TENSORS = ("sinks", "alibi_slopes", "kv_b_proj")  # of a layer, or None
_SCALES = ("q_scale", "k_scale", "v_scale")  # they may be numbers
_OF_LAYER = (*_TENSORS, *_SCALES)


class OwnScales:
    """What a layer with scales says of them while a graph is traced."""

    def asking_scale(self) -> str | None:
        """Return the first scale that asks for a derivative, and how; the graph keeps the answer.

        A method, because the tracer calls those of any object, and functions with constants alone.
        """
        for name in _SCALES:
            if how := _how(getattr(self, name, None), _is_forward()):
                return f"the layer's {name} {how}"
        return None

    # What torch.compiler.assume_constant_result does; that loads the tracer, which takes a second.
    asking_scale._dynamo_marked_constant = True  # type: ignore[attr-defined]


def refuse_gradients(layer: Any, **tensors: object) -> None:
    """Refuse a call whose output would have to carry gradients that its backend does not compute.

    It looks at no contents, and at two flags of torch where nothing is differentiated. While a
    graph is traced it asks the layer's scales without the graph, which would be traced again for
    each of their values: a scale that is put there later is not seen by that graph.

    Args:
        layer: the calling `Attention` or `MLAAttention`; its own tensors are looked at as well.
        tensors: arguments of the call by name; None and numbers ask for nothing.

    Raises:
        UnsupportedOptionError: names the tensor, the backend and what to do.
    """
    if not is_differentiating():
        return
    asking = _asking(tensors) or _asking_of(layer)
    if asking is not None and not layer.impl.differentiates:
        _refuse(asking, str(layer.selection.chosen))


def require_no_gradients(name: str, tensors: Mapping[str, object]) -> None:
    """Refuse tensors that require a gradient while gradients are on, and such with a tangent.

    Args:
        name: of what computes none.
        tensors: by name; whatever is no tensor asks for nothing.

    Raises:
        UnsupportedOptionError: names the tensor and what to do.
    """
    if not is_differentiating():
        return
    asking = _asking(tensors)
    if asking is not None:
        _refuse(asking, name)


def is_differentiating() -> bool:
    """Whether any tensor can ask for a derivative here: what `require_no_gradients` asks first."""
    return torch.is_grad_enabled() or _is_forward()


def _is_forward() -> bool:
    """Whether tangents are carried along (forward mode), which no_grad leaves on."""
    level: int = getattr(forward_ad, "_current_level", -1)  # no part of torch's promises
    return level >= 0


def _asking(tensors: Mapping[str, object]) -> str | None:
    """Return the first tensor that asks for a derivative, and how."""
    is_forward = _is_forward()
    for name, tensor in tensors.items():
        if how := _how(tensor, is_forward):
            return f"{name} {how}"
    return None


def _how(tensor: object, is_forward: bool) -> str | None:
    """Return in which words a tensor asks for a derivative; None: it does not."""
    if not isinstance(tensor, torch.Tensor):
        return None
    if tensor.requires_grad and torch.is_grad_enabled():
        return "requires a gradient"
    if is_forward and forward_ad.unpack_dual(tensor).tangent is not None:
        return "carries a tangent of forward-mode differentiation"
    return None


def _asking_of(layer: Any) -> str | None:
    """Return the first tensor of a layer's own that asks for a derivative, and how."""
    is_forward, is_traced = _is_forward(), torch.compiler.is_compiling()
    for name in _TENSORS if is_traced else _OF_LAYER:
        if how := _how(getattr(layer, name, None), is_forward):
            return f"the layer's {name} {how}"
    asking: str | None = layer.asking_scale() if is_traced else None
    return asking


def _refuse(asking: str, name: str) -> NoReturn:
    off = "torch.inference_mode()" + ("" if _is_forward() else " or torch.no_grad()")
    raise UnsupportedOptionError(
        f"{asking}, and {name} computes none: attention here is for inference.",
        hint=f"call it inside {off}, or detach the tensor.",
    )
