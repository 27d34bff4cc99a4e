"""vLLM's cache tensors as the tensors that attn's kernels read; no byte is moved."""

from __future__ import annotations

from math import prod

import torch

from attn_shared.errors import InvalidInputError
from attn_shared.kv_cache import AttentionSpec

__all__ = ["view_cache"]


def view_cache(kv_cache: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
    """Return one layer's cache in the shape and strides of its description.

    A page of vLLM's holds the bytes of one block, whatever they mean: where the tensor does not
    have the described shape already, each page is read anew by the description.

    Args:
        kv_cache: vLLM's tensor, blocks first; its dtype may be another of the same width (fp8 is
            stored as uint8 there).
        spec: the layer's cache.

    Raises:
        InvalidInputError: pages are not contiguous, or are smaller than the description's.
    """
    if kv_cache.dtype is not spec.dtype:
        kv_cache = kv_cache.view(spec.dtype)
    shape = spec.shape(kv_cache.shape[0])
    if tuple(kv_cache.shape) == shape:
        return kv_cache
    _check_pages(kv_cache, spec, prod(shape[1:]))
    strides = (kv_cache.stride(0), *spec.strides(1)[1:])
    return kv_cache.as_strided(shape, strides, kv_cache.storage_offset())


def _check_pages(kv_cache: torch.Tensor, spec: AttentionSpec, page: int) -> None:
    """Refuse what cannot be read as pages of `page` elements."""
    inner = sorted(zip(kv_cache.stride()[1:], kv_cache.shape[1:], strict=True))
    expected, is_dense = 1, True
    for stride, size in inner:
        is_dense &= size == 1 or stride == expected
        expected *= size
    if not is_dense or expected < page:
        raise InvalidInputError.for_argument(
            "kv_cache",
            f"{tuple(kv_cache.shape)} with strides {kv_cache.stride()}",
            f"blocks of {page} contiguous elements or more, for {spec.num_kv_heads} heads of "
            f"{spec.head_size} + {spec.head_size_v} and {spec.block_size} tokens",
        )
