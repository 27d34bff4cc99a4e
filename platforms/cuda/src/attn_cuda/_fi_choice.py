"""Which of FlashInfer's kernels rows run on: the choices of a step, and their words."""

from __future__ import annotations

from attn_shared.device import DeviceFacts
from attn_shared.dtypes import kv_storage_dtype
from attn_shared.kernel_paths import KernelPath
from attn_shared.request import AttentionRequest

__all__ = ["FEW_ROWS", "decodes_on_tensor_cores", "has_hoppers_kernels", "kernel_paths_of"]

FEW_ROWS = 16
"""Up to here a request's rows are bound by memory, and the kernels "fa2", which split keys, serve
them best."""

_PLAIN_GROUPS = (1, 2, 3)


def decodes_on_tensor_cores(group: int, *, is_quantized: bool) -> bool:
    """Whether so many query heads of a kv head decode on tensor cores.

    They read each key once for all heads of a group: measured on an H200 with 4 heads in a group,
    1.5 times as fast from 32 requests on. The plain kernel has no groups but 1, 2, 3, 4 and 8, and
    none for fp8 caches that pays.
    """
    return is_quantized or group not in _PLAIN_GROUPS


def has_hoppers_kernels(major: int, *, is_quantized: bool) -> bool:
    """Whether "fa3" may run a layer: on Hopper, over a cache that is not quantised."""
    return major == 9 and not is_quantized


def kernel_paths_of(request: AttentionRequest, device: DeviceFacts) -> tuple[KernelPath, ...]:
    """Return the ways of a request that FLASHINFER's capability serves."""
    is_quantized = kv_storage_dtype(request.kv_cache_dtype, request.dtype).itemsize == 1
    major = 0 if device.capability is None else device.capability.major
    is_sharded = request.dcp_size > 1
    decode = _decode(request.queries_per_kv, is_quantized=is_quantized, is_sharded=is_sharded)
    if not has_hoppers_kernels(major, is_quantized=is_quantized):
        why = f"{device.arch} has no others" if major != 9 else "the cache is quantised"
        return decode, KernelPath(rows="prompts", kernel='"fa2"', why=why)
    if is_sharded:
        why = 'every call is asked for its LSE, which "fa2" sums from rounded weights'
        return decode, KernelPath(rows="prompts", kernel='"fa3"', why=why)
    return (
        decode,
        KernelPath(
            rows="prompts",
            kernel='"fa3"',
            why=f"more than {FEW_ROWS} rows per request on the average, on Hopper",
        ),
        KernelPath(
            rows="short prompts",
            kernel='"fa2"',
            why=f"at most {FEW_ROWS} rows per request on the average: it splits keys",
        ),
    )


def _decode(group: int, *, is_quantized: bool, is_sharded: bool) -> KernelPath:
    words = f"{group} query heads per kv head"
    if is_sharded:
        why = "every call is asked for its LSE, which tensor cores sum from rounded weights"
        return KernelPath(rows="decodes", kernel="plain decode", why=why)
    if not decodes_on_tensor_cores(group, is_quantized=is_quantized):
        return KernelPath(rows="decodes", kernel="plain decode", why=words)
    why = "the cache is quantised" if is_quantized else words
    return KernelPath(rows="decodes", kernel="decode on tensor cores", why=why)
