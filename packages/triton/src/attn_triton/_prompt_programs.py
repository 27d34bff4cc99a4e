"""What a layer's long prompts run on, for calls of one kind: route, matrices, compiled kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from attn_shared.spec import LayerSpec
from attn_triton._keys import KeysValues
from attn_triton._noting import PendingHandle
from attn_triton._prompts import COPIED_TOKENS, PromptGrid
from attn_triton._route import Context, Fresh, Route, plain_because, route_of, tile_within
from attn_triton._rows import Matrix, cache_matrix, dense_matrix, token_matrix
from attn_triton._visibility import Visibility
from attn_triton.launch import AlignedLaunch, Handle, Launcher
from attn_triton.machine import machine_of
from attn_triton.prompt_tiles import PromptKernel, PromptTile

__all__ = ["Matrices", "PromptProgram", "program_for"]

Matrices = tuple[Matrix, Matrix]
"""Of keys and of values."""


@dataclass(slots=True, kw_only=True, eq=False)
class PromptProgram:
    """The kernel for long prompts, for calls of one kind.

    Attributes:
        route: where keys are read.
        tile: of one program.
        query: of the call, but for its rows.
        fresh: the call's keys and values likewise, where they are read.
        cached: the cache's, or the rows that they are copied to, likewise.
        launcher: compiles, and looks at each tensor.
        describe: makes descriptors of tensors, in the kernel's own form.
        copier: copies pages to rows, with Context.ROWS.
        handles: take addresses of aligned tensors; by whether there are no LSE and no scales.
    """

    route: Route
    tile: PromptTile
    query: Matrix
    fresh: Matrices | None
    cached: Matrices | None
    launcher: Launcher
    describe: Callable[..., Any]
    copier: AlignedLaunch | None
    handles: dict[tuple[bool, bool], Handle | PendingHandle] = field(default_factory=dict)


def program_for(
    spec: LayerSpec,
    seen: Visibility,
    grid: PromptGrid,
    query: Tensor,
    output: Tensor,
    fresh: tuple[Tensor, Tensor] | None,
    keys: KeysValues,
    causal: int,
    scales_mode: int,
) -> PromptProgram | None:
    """Return what runs calls like this one; None: the plain kernel does.

    Args:
        spec: of the layer.
        seen: what its queries see.
        grid: of the step.
        query: (T, Hq, D).
        output: (T, Hq, Dv).
        fresh: the step's keys and values, which may be read in the cache's stead, or None.
        keys: where the cached ones are.
        causal: 0 no, 1 yes, 2 by request.
        scales_mode: of the cache: 0 none, 1 per tensor, 2 per kv head.
    """
    kind = grid.kind
    arch = machine_of(query.device).arch
    reason = plain_because(spec, arch, keys.dtype, is_invariant=kind.is_invariant)
    matrix = token_matrix(query)
    if reason is not None or matrix is None:
        return None
    new = _pair(*(token_matrix(each) for each in fresh)) if fresh is not None else None
    cached = _cached(spec, keys) if keys.page else None
    route = route_of(
        spec,
        kind.tile,
        page=keys.page,
        is_stored_alike=keys.dtype is spec.dtype and cached is not None,
        has_fresh=new is not None,
        has_context=kind.has_context,
        may_copy=kind.may_copy,
    )
    if route is None:
        return None
    if route.fresh is Fresh.NONE:
        new = None
    if route.context is Context.NONE:
        cached, scales_mode = None, 0
    copier, tile = None, kind.tile
    if route.context is Context.PAGES:
        tile = tile_within(tile, keys.page) or tile
    if route.context is Context.ROWS:
        copier = _copier(spec, keys, is_context=route.fresh is Fresh.STEP)
        sizes = (spec.head_size, spec.head_size_v)
        first, second = (dense_matrix(spec.num_kv_heads, size) for size in sizes)
        cached = first, second
    constants = {
        **_places(matrix, output, new, cached),
        **_of_layer(spec),
        **_of_route(route, keys.page),
        "BLOCK": tile.block,
        "BN": tile.keys,
        "STAGES": tile.stages,
        "CAUSAL": causal,
        "SCALES": scales_mode,
    }
    make = _portable if tile.kernel is PromptKernel.PORTABLE else _for_hopper
    launcher, describe = make(spec, seen, tile, constants)
    return PromptProgram(
        route=route,
        tile=tile,
        query=matrix,
        fresh=new,
        cached=cached,
        launcher=launcher,
        describe=describe,
        copier=copier,
    )


def _portable(
    spec: LayerSpec, seen: Visibility, tile: PromptTile, constants: dict[str, object]
) -> tuple[Launcher, Callable[..., Any]]:
    from attn_triton.kernels.describing import described
    from attn_triton.kernels.prompt import prompt

    own = {
        "TWO": tile.is_pair,
        "LEFT": seen.left,
        "RIGHT": seen.right,
        "CHUNK": seen.chunk,
        "SOFTCAP": spec.softcap is not None,
    }
    registers = {} if tile.max_registers is None else {"maxnreg": tile.max_registers}
    launcher = Launcher(prompt, constants | own, num_warps=tile.num_warps, options=registers)
    return launcher, described


def _for_hopper(
    spec: LayerSpec, seen: Visibility, tile: PromptTile, constants: dict[str, object]
) -> tuple[Launcher, Callable[..., Any]]:
    """Return the same of the other kernel, which `portable_because` keeps from the rest."""
    from attn_triton.kernels.describing_hopper import described_for_hopper
    from attn_triton.kernels.prompt_hopper import prompt_hopper

    own = {"STAGED": tile.is_staged}
    launcher = Launcher(prompt_hopper, constants | own, num_warps=tile.num_warps)
    return launcher, described_for_hopper


def _pair(key: Matrix | None, value: Matrix | None) -> Matrices | None:
    return None if key is None or value is None else (key, value)


def _cached(spec: LayerSpec, keys: KeysValues) -> Matrices | None:
    key, value = (
        cache_matrix(
            address,
            strides,
            (keys.rows, keys.page, spec.num_kv_heads, width),
            keys.dtype.itemsize,
        )
        for address, strides, width in zip(
            (keys.key, keys.value), keys.strides, (spec.head_size, spec.head_size_v), strict=True
        )
    )
    return _pair(key, value)


def _copier(spec: LayerSpec, keys: KeysValues, *, is_context: bool) -> AlignedLaunch:
    from attn_triton.kernels.blocks import copy_pages

    names = ("K_BLOCK", "K_TOKEN", "K_HEAD", "V_BLOCK", "V_TOKEN", "V_HEAD")
    constants = {
        **dict(zip(names, (*keys.strides[0], *keys.strides[1]), strict=True)),
        "HK": spec.num_kv_heads,
        "D": spec.head_size,
        "DV": spec.head_size_v,
        "PAGE": keys.page,
        "FRESH": is_context,
        "ROWS": COPIED_TOKENS,
    }
    return AlignedLaunch(Launcher(copy_pages, constants, num_warps=4))


def _places(
    query: Matrix, output: Tensor, new: Matrices | None, cached: Matrices | None
) -> dict[str, object]:
    key, value = (None, None) if cached is None else cached
    found: dict[str, object] = {
        "Q_HEAD": query.head_columns,
        "O_TOKEN": output.stride(0),
        "O_HEAD": output.stride(1),
        "NEW_K_HEAD": 0 if new is None else new[0].head_columns,
        "NEW_V_HEAD": 0 if new is None else new[1].head_columns,
    }
    for name, matrix in (("K", key), ("V", value)):
        found[f"{name}_ROWS"] = 0 if matrix is None else matrix.block_rows
        found[f"{name}_HEAD_ROWS"] = 0 if matrix is None else matrix.head_rows
        found[f"{name}_HEAD"] = 0 if matrix is None else matrix.head_columns
    return found


def _of_layer(spec: LayerSpec) -> dict[str, object]:
    return {
        "HQ": spec.num_heads,
        "HK": spec.num_kv_heads,
        "D": spec.head_size,
        "DV": spec.head_size_v,
    }


def _of_route(route: Route, page: int) -> dict[str, Any]:
    return {
        "CONTEXT": int(route.context),
        "FRESH": int(route.fresh),
        "PAGE": page if route.context is Context.PAGES else 0,
    }
