"""What a kernel refuses in its arguments, in the words of a kernel: RuntimeError."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_conformance.stubs.attend import KernelCall
from attn_shared.dtypes import dtype_name
from attn_shared.quantization import FP8_DTYPES

__all__ = ["Limits", "check_indices", "check_kernel_call", "check_output", "refuse_unless"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What tensors a kernel takes.

    Attributes:
        dtypes: of the query, and of keys and values unless the next says more.
        cache_dtypes: of keys and values, beside the query's own.
        head_size_multiple: D and Dv are multiples of it.
        head_size_max: and not more than this.
        page_multiple: tokens per page are a multiple of it.
    """

    dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)
    cache_dtypes: tuple[torch.dtype, ...] = ()
    head_size_multiple: int = 8
    head_size_max: int = 256
    page_multiple: int = 1


def refuse_unless(holds: bool, name: str, message: str) -> None:
    """Raise a kernel's error, which names the function, unless something holds."""
    if not holds:
        raise RuntimeError(f"{name}: {message}")


def check_indices(name: str, parameter: str, tensor: object, shape: tuple[int | None, ...]) -> None:
    """Refuse what is no dense int32 tensor of some shape; None stands for any size."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}(): {parameter} must be a Tensor, not {type(tensor).__name__}")
    refuse_unless(
        tensor.dtype is torch.int32, name, f"{parameter} must be int32, not {tensor.dtype}"
    )
    fits = tensor.ndim == len(shape) and all(
        want is None or want == have for want, have in zip(shape, tensor.shape, strict=True)
    )
    words = f"{parameter} must have shape {shape}, not {tuple(tensor.shape)}"
    refuse_unless(fits, name, words.replace("None", "any"))
    is_dense = tensor.ndim == 0 or tensor.shape[-1] <= 1 or tensor.stride(-1) == 1
    refuse_unless(is_dense, name, f"{parameter} must be dense in its last dimension")


def check_kernel_call(name: str, call: KernelCall, limits: Limits) -> None:
    """Refuse tensors that a kernel of these limits does not take."""
    _check_dtypes(name, call, limits)
    is_paged = call.block_table is not None
    for part, tensor in (("query", call.query), ("key", call.key), ("value", call.value)):
        ndim = 4 if is_paged and part != "query" else 3
        words = f"{part} must have {ndim} dimensions, not {tensor.ndim}"
        refuse_unless(tensor.ndim == ndim, name, words)
        is_dense = tensor.stride(-1) == 1 or tensor.shape[-1] == 1
        refuse_unless(is_dense, name, f"{part} must be dense in its last dimension")
    _check_heads(name, call, limits)
    if is_paged:
        size = call.key.shape[1]
        words = f"a page of {size} tokens is no multiple of {limits.page_multiple}"
        refuse_unless(size % limits.page_multiple == 0, name, words)
    for part, tensor, scale in zip(
        ("query", "key", "value"), (call.query, call.key, call.value), call.descales, strict=True
    ):
        is_one = bool((torch.as_tensor(scale) == 1).all())
        words = f"a descale of {part} needs fp8, not {dtype_name(tensor.dtype)}"
        refuse_unless(is_one or tensor.dtype in FP8_DTYPES, name, words)
    heads = call.query.shape[1]
    for part, per_head in (("slopes", call.alibi_slopes), ("sinks", call.sinks)):
        if per_head is not None:
            words = f"{part} must be ({heads},), not {tuple(per_head.shape)}"
            refuse_unless(per_head.shape == (heads,), name, words)


def _check_dtypes(name: str, call: KernelCall, limits: Limits) -> None:
    dtype = call.query.dtype
    words = f"query must be {_names(limits.dtypes)}, not {dtype_name(dtype)}"
    refuse_unless(dtype in limits.dtypes, name, words)
    for part, tensor in (("key", call.key), ("value", call.value)):
        allowed = (dtype, *limits.cache_dtypes)
        words = f"{part} must be {_names(allowed)}, not {dtype_name(tensor.dtype)}"
        refuse_unless(tensor.dtype in allowed, name, words)


def _check_heads(name: str, call: KernelCall, limits: Limits) -> None:
    heads, kv_heads = call.query.shape[1], call.key.shape[-2]
    words = f"{heads} query heads are no multiple of {kv_heads} kv heads"
    refuse_unless(kv_heads > 0 and heads % kv_heads == 0, name, words)
    words = f"key heads are {call.key.shape[-1]} wide, query heads {call.query.shape[-1]}"
    refuse_unless(call.key.shape[-1] == call.query.shape[-1], name, words)
    for size in (call.query.shape[-1], call.value.shape[-1]):
        fits = size % limits.head_size_multiple == 0 and size <= limits.head_size_max
        words = (
            f"head size {size} is not supported: a multiple of {limits.head_size_multiple}, at "
            f"most {limits.head_size_max}"
        )
        refuse_unless(fits, name, words)


def check_output(
    name: str, parameter: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Refuse a tensor to write to that has another shape or dtype."""
    fits = tuple(tensor.shape) == shape and tensor.dtype is dtype
    found = f"{dtype_name(tensor.dtype)} {tuple(tensor.shape)}"
    refuse_unless(fits, name, f"{parameter} must be {dtype_name(dtype)} {shape}, not {found}")


def _names(dtypes: Collection[torch.dtype]) -> str:
    return " or ".join(dict.fromkeys(map(dtype_name, dtypes)))
