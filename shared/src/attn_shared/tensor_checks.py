"""Single arguments of a call: tensors by shape, dtype and place, and numbers by their values."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attn_shared.errors import InvalidInputError, MetadataError
from attn_shared.kv_cache import AttentionSpec, KVCacheSpec, MLAAttentionSpec

__all__ = [
    "check_block_size",
    "check_is_tensor",
    "check_like",
    "check_rows",
    "check_scale",
    "check_scale_form",
    "check_shape",
]


def check_rows(
    name: str,
    tensor: Tensor,
    num_rows: int,
    tail: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Refuse a tensor of a call that has not one row per token, of a width, dtype and place.

    Args:
        name: of the argument.
        tensor: (at least num_rows, *tail).
        num_rows: tokens that the metadata describes.
        tail: the other dimensions.
        dtype: the layer's.
        device: the query's.

    Raises:
        InvalidInputError: as said.
    """
    check_is_tensor(name, tensor)
    if tensor.shape[1:] != tail or len(tensor) < num_rows:
        sizes = ", ".join(map(str, (f"at least {num_rows}", *tail)))
        raise InvalidInputError.for_argument(f"{name} shape", tuple(tensor.shape), f"({sizes})")
    check_like(name, tensor, dtype, device)


def check_block_size(block_size: int | None, spec: KVCacheSpec | None) -> None:
    """Refuse slots that were computed for blocks of another size than the cache has.

    Args:
        block_size: what the batch was described with; None: not known.
        spec: the cache.

    Raises:
        MetadataError: they differ.
    """
    if block_size is None or not isinstance(spec, AttentionSpec | MLAAttentionSpec):
        return
    if block_size != spec.block_size:
        raise MetadataError.for_argument(
            "block_size",
            block_size,
            f"{spec.block_size}, that of the layer's cache",
            hint="describe the batch with the layer's selection.block_size, or build the layer "
            f"with block_size={block_size}.",
        )


def check_scale(name: str, scale: float | Tensor, num_kv_heads: int) -> None:
    """Refuse a cache scale that is not positive and finite.

    It looks at a tensor's contents, wherever they are: for constructors, not for `forward`.

    Args:
        name: of the argument.
        scale: a number, a tensor of one, or (Hkv,).
        num_kv_heads: Hkv.

    Raises:
        InvalidInputError: as said, or it is neither a number nor one number per kv head.
    """
    check_scale_form(name, scale, num_kv_heads)
    if isinstance(scale, Tensor) and not bool((scale.isfinite() & (scale > 0)).all()):
        raise InvalidInputError.for_argument(name, repr(scale), _allowed_scales(num_kv_heads))


def check_scale_form(name: str, scale: float | Tensor, num_kv_heads: int) -> None:
    """Refuse a number that is no scale, and a tensor of another shape, unread."""
    if isinstance(scale, Tensor):
        if scale.numel() != 1 and scale.shape != (num_kv_heads,):
            raise InvalidInputError.for_argument(
                f"{name} shape", tuple(scale.shape), _allowed_scales(num_kv_heads)
            )
        return
    is_number = isinstance(scale, int | float) and not isinstance(scale, bool)
    if not is_number or not 0 < scale < math.inf:
        raise InvalidInputError.for_argument(name, repr(scale), _allowed_scales(num_kv_heads))


def _allowed_scales(num_kv_heads: int) -> str:
    return f"a positive finite number, or a tensor of one or of {num_kv_heads} (kv heads)"


def check_is_tensor(name: str, value: object) -> None:
    """Refuse what is no dense tensor."""
    if not isinstance(value, Tensor):
        raise InvalidInputError.for_argument(name, f"a {type(value).__name__}", "a tensor")
    if value.layout is not torch.strided:
        raise InvalidInputError.for_argument(f"{name} layout", value.layout, "torch.strided")


def check_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """Refuse a tensor of another shape."""
    check_is_tensor(name, tensor)
    if tensor.shape != shape:
        raise InvalidInputError.for_argument(f"{name} shape", tuple(tensor.shape), str(shape))


def check_like(name: str, tensor: Tensor, dtype: torch.dtype, device: torch.device) -> None:
    """Refuse a tensor of another dtype, or on another device than the query's."""
    if tensor.dtype is not dtype:
        raise InvalidInputError.for_argument(f"{name} dtype", tensor.dtype, str(dtype))
    if tensor.device != device:
        raise InvalidInputError.for_argument(
            f"{name} device", tensor.device, f"{device}, the query's"
        )
