"""Which of attn_triton's kernels a request would run on, by the functions that choose them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from attn_shared.arch import Arch, parse_arch
from attn_shared.device import DeviceFacts
from attn_shared.dtypes import kv_storage_dtype
from attn_shared.kernel_paths import KernelPath
from attn_shared.kv_cache import spec_for
from attn_shared.request import AttentionRequest
from attn_shared.spec import LayerSpec
from attn_shared.vendor import Vendor
from attn_triton._route import (
    LEAST_TOKENS,
    MOST_COPIED_BYTES,
    Context,
    plain_because,
    portable_because,
    route_of,
    tile_of,
)
from attn_triton._steps import MAX_DECODE_TOKENS

__all__ = ["arch_of", "kernel_paths_of"]

_PLAIN = "the plain kernel, by blocks of query rows"
_LONG = "the kernel for long prompts"
_HOPPER = "the kernel for long prompts on Hopper"


def kernel_paths_of(request: AttentionRequest, device: DeviceFacts) -> tuple[KernelPath, ...]:
    """Return the ways of a request that TRITON_ATTN's capability serves.

    A layer's scale is taken for positive, rows of the call for ones that a descriptor reads,
    `BuildConfig` for its default, and Triton for one with Gluon: otherwise the plain kernel runs,
    fresh keys of a quantised cache are read, or the kernel for long prompts of every GPU runs.

    Args:
        request: with the block size that it would get.
        device: where it would run.
    """
    spec, arch = _layer(request, device), arch_of(device)
    found = [] if request.is_cache_free else [_decodes(request)]
    stored = spec.dtype if request.is_cache_free else _stored(request, device)
    reason = plain_because(spec, arch, stored, is_invariant=request.batch_invariant)
    if reason is not None:
        found.append(KernelPath(rows="prompts", kernel=_PLAIN, why=reason))
        return tuple(found)
    if not request.batch_invariant:
        few = f"no request of the step has {LEAST_TOKENS} query tokens"
        found.append(KernelPath(rows="short prompts", kernel=_PLAIN, why=few))
    return (*found, *_long_prompts(request, spec, arch, stored))


def _decodes(request: AttentionRequest) -> KernelPath:
    most = 1 if request.batch_invariant else MAX_DECODE_TOKENS
    why = f"at most {most} query {'token' if most == 1 else 'tokens'} per request"
    if request.use_mm_prefix:
        why = f"{why}, in steps without multimodal ranges"
    return KernelPath(rows="decodes", kernel="the split-KV kernel", why=why)


def _long_prompts(
    request: AttentionRequest, spec: LayerSpec, arch: Arch, stored: torch.dtype
) -> Iterator[KernelPath]:
    """Say where keys are read, for requests without and with keys of earlier steps."""
    tile = tile_of(spec, arch)
    if tile is None:
        return
    portable = portable_because(spec, arch, has_gluon=True)
    kernel = _HOPPER if portable is None else _LONG
    instead = f"; not that for Hopper: {portable}" if portable and arch.family == "hopper" else ""
    page = 0 if request.is_cache_free else request.block_size or 0
    whens = {False: "long prompts, all keys new", True: "long prompts after earlier keys"}
    if request.is_cache_free:
        whens = {False: "prompts"}
    elif request.batch_invariant:  # what a request reads must not depend on its company
        whens = {True: "prompts"}
    for has_context, rows in whens.items():
        route = route_of(
            spec,
            tile,
            page=page,
            is_stored_alike=stored is spec.dtype,
            has_fresh=request.is_cache_free or stored is spec.dtype,
            has_context=has_context,
            may_copy=True,
        )
        if route is None:
            yield KernelPath(rows=rows, kernel=_PLAIN, why="keys can be read in no other way")
            continue
        yield KernelPath(rows=rows, kernel=kernel, why=_reads(route.context, page) + instead)


def _reads(context: Context, page: int) -> str:
    match context:
        case Context.NONE:
            return "keys are read from the tensors of the call"
        case Context.PAGES:
            return f"whole tiles of keys lie in a page of {page}"
        case Context.ROWS:
            most = MOST_COPIED_BYTES // 2**20
            return (
                f"keys are first copied out of pages of {page}, up to {most} MiB; past that "
                f"{_PLAIN}"
            )


def _layer(request: AttentionRequest, device: DeviceFacts) -> LayerSpec:
    cache = None
    if not request.is_cache_free and request.block_size is not None:
        flavour = device.fp8_dtype or torch.float8_e4m3fn
        cache = spec_for(request, block_size=request.block_size, fp8_e4m3_dtype=flavour)
    return LayerSpec.from_request(request, scale=1.0, kv_cache_spec=cache)


def _stored(request: AttentionRequest, device: DeviceFacts) -> torch.dtype:
    flavour = device.fp8_dtype or torch.float8_e4m3fn
    return kv_storage_dtype(request.kv_cache_dtype, request.dtype, flavour)


def arch_of(device: DeviceFacts) -> Arch:
    """Return the architecture as `machine_of` finds it: torch tells none of Intel's apart."""
    if device.vendor is Vendor.INTEL:
        return Arch(vendor=Vendor.INTEL, canonical="xpu")
    return parse_arch(device.arch)
