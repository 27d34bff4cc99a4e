"""What a call of `Attention` must fulfil before anything is done, the cache written included.

The implementation checks its arguments too, but only after the step's keys and values were stored:
a query of the wrong dtype would be refused with the cache already changed.
"""

from __future__ import annotations

import math

import torch

from attn_shared.errors import InvalidInputError, MetadataError
from attn_shared.kv_cache import AttentionSpec, KVCacheSpec, MLAAttentionSpec
from attn_shared.spec import LayerSpec

__all__ = ["check_block_size", "check_call", "check_scale"]


def check_call(
    spec: LayerSpec, query: object, output: object, lse: object, num_tokens: int
) -> None:
    """Refuse a query, output or LSE that no implementation of this layer takes.

    Args:
        spec: the layer.
        query: (T, Hq, D) of the layer's dtype, T at least `num_tokens`.
        output: (T, Hq, Dv) of the layer's dtype, or None.
        lse: (Hq, T) float32, or None.
        num_tokens: tokens that the plan describes.

    Raises:
        InvalidInputError: names the argument, its value and what is allowed.
    """
    heads = spec.num_heads
    rows = query.shape[0] if isinstance(query, torch.Tensor) and query.ndim else 0
    _check("query", query, (rows, heads, spec.head_size), spec.dtype, f"T, {heads}")
    if rows < num_tokens:
        raise InvalidInputError.for_argument(
            "query rows",
            rows,
            f"at least {num_tokens}, the tokens that the plan describes",
            hint="make a plan of this batch.",
        )
    if output is not None:
        _check("output", output, (rows, heads, spec.head_size_v), spec.dtype)
    if lse is not None:
        _check("lse", lse, (heads, rows), torch.float32)


def _check(
    name: str,
    tensor: object,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    leading: str | None = None,
) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise InvalidInputError.for_argument(name, f"a {type(tensor).__name__}", "a tensor")
    if tensor.shape != shape:
        allowed = str(shape) if leading is None else f"({leading}, {shape[-1]})"
        raise InvalidInputError.for_argument(f"{name} shape", tuple(tensor.shape), allowed)
    if tensor.dtype is not dtype:
        raise InvalidInputError.for_argument(f"{name} dtype", tensor.dtype, str(dtype))


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


def check_scale(name: str, scale: object, num_kv_heads: int) -> None:
    """Refuse a cache scale that is not positive and finite; looks at a tensor's contents, once.

    Raises:
        InvalidInputError: as said, or it is neither a number nor one number per kv head.
    """
    allowed = f"a positive finite number, or a tensor of one or of {num_kv_heads} (kv heads)"
    if isinstance(scale, torch.Tensor):
        if scale.numel() != 1 and tuple(scale.shape) != (num_kv_heads,):
            raise InvalidInputError.for_argument(f"{name} shape", tuple(scale.shape), allowed)
        is_good = bool((scale.isfinite() & (scale > 0)).all())
    else:
        is_number = isinstance(scale, int | float) and not isinstance(scale, bool)
        is_good = is_number and math.isfinite(scale) and scale > 0
    if not is_good:
        raise InvalidInputError.for_argument(name, repr(scale), allowed)
