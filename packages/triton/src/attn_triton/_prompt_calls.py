"""One layer's launches of the kernel for long prompts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from attn_shared.spec import LayerSpec
from attn_triton._keys import KeysValues, KeysValuesTensors
from attn_triton._metadata import TritonAttentionMetadata
from attn_triton._prompts import COPIED_TOKENS, PromptGrid
from attn_triton._route import Context, Fresh, Route, plain_because, route_of
from attn_triton._rows import Matrix, cache_matrix, token_matrix
from attn_triton._visibility import Visibility
from attn_triton.launch import Launcher
from attn_triton.machine import machine_of

__all__ = ["PromptCall", "PromptCalls"]

Matrices = tuple[Matrix, Matrix]
"""Of keys and of values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptCall:
    """What a layer hands over for a step's long prompts.

    Attributes:
        query: (T, Hq, D).
        output: (T, Hq, Dv).
        lse: (Hq, T), or None.
        fresh: the step's keys and values, (T, Hkv, D) and (T, Hkv, Dv), or None.
        keys: where the cached ones are.
        tensors: returns the same as tensors.
        scale, v_scale, cap: factors on logits and values, and the cap on logits.
        scales_mode: 0 none, 1 per tensor, 2 per kv head.
        scales: of the cache's keys and values, on the device.
        sinks: (Hq,), or None.
    """

    query: Tensor
    output: Tensor
    lse: Tensor | None
    fresh: tuple[Tensor, Tensor] | None
    keys: KeysValues
    tensors: Callable[[], KeysValuesTensors]
    scale: float
    v_scale: float
    cap: float
    scales_mode: int
    scales: tuple[Tensor | None, Tensor | None]
    sinks: Tensor | None


class PromptCalls:
    """Runs the kernel for long prompts, for one layer.

    Args:
        spec: of the layer.
        visibility: of its queries.
    """

    def __init__(self, spec: LayerSpec, visibility: Visibility) -> None:
        self._spec = spec
        self._seen = visibility
        self._launchers: dict[Any, Launcher] = {}
        self._copiers: dict[Any, Launcher] = {}
        self._served: dict[Any, bool] = {}

    def run(self, call: PromptCall, metadata: TritonAttentionMetadata) -> bool:
        """Launch it; return False where the plain kernel has to run instead."""
        grid = metadata.prompts
        if grid is None or not self._is_served(call, grid):
            return False
        query = token_matrix(call.query, metadata.num_actual_tokens)
        if query is None:
            return False
        fresh, cached = self._fresh(call, metadata), self._cached(call.keys)
        route = self._route(call, grid, fresh is not None, cached)
        if route is None:
            return False
        keys: tuple[Any, Any] = (None, None)
        if route.context is Context.ROWS:
            cached, keys = self._copy(call, grid, metadata, is_context=route.fresh is Fresh.STEP)
        elif route.context is Context.PAGES and cached is not None:
            keys = self._described(call.keys, call.tensors, cached, grid.tile.keys)
        self._launch(call, grid, metadata, route, query, fresh, cached, keys)
        return True

    def _is_served(self, call: PromptCall, grid: PromptGrid) -> bool:
        key = (call.keys.dtype, call.query.device, grid.is_invariant)
        found = self._served.get(key)
        if found is None:
            arch = machine_of(call.query.device).arch
            reason = plain_because(
                self._spec, arch, call.keys.dtype, is_invariant=grid.is_invariant
            )
            found = self._served[key] = reason is None
        return found

    def _fresh(self, call: PromptCall, metadata: TritonAttentionMetadata) -> Matrices | None:
        """Return the step's keys and values as matrices; None where none may be read."""
        if call.fresh is None:
            return None
        tokens = metadata.num_keys or metadata.num_actual_tokens
        key, value = (token_matrix(each, tokens) for each in call.fresh)
        return None if key is None or value is None else (key, value)

    def _cached(self, keys: KeysValues) -> Matrices | None:
        if not keys.page:
            return None
        return _cache_matrices(keys, self._spec)

    def _route(
        self, call: PromptCall, grid: PromptGrid, has_fresh: bool, cached: Matrices | None
    ) -> Route | None:
        spec, count = self._spec, grid.prompts.num_keys
        token = spec.num_kv_heads * (spec.head_size + spec.head_size_v) * spec.dtype.itemsize
        return route_of(
            spec,
            grid.tile,
            page=call.keys.page,
            is_stored_alike=call.keys.dtype is spec.dtype and cached is not None,
            has_fresh=has_fresh,
            has_context=grid.prompts.has_context,
            copied_bytes=None if count is None else count * token,
        )

    def _described(
        self,
        keys: KeysValues,
        tensors: Callable[[], KeysValuesTensors],
        cached: Matrices,
        tile: int,
    ) -> tuple[Any, Any]:
        """Return descriptors of a cache; on a GPU by address, so that they keep nothing alive."""
        from attn_triton.kernels.describing import Place

        widths = (self._spec.head_size, self._spec.head_size_v)
        bases: tuple[Any, Any] = (Place(keys.key, keys.dtype), Place(keys.value, keys.dtype))
        if keys.device.type == "cpu":  # the interpreter wants tensors
            bases = tensors()[:2]
        first, second = (
            _describe(base, matrix, (tile, width))
            for base, matrix, width in zip(bases, cached, widths, strict=True)
        )
        return first, second

    def _copy(
        self,
        call: PromptCall,
        grid: PromptGrid,
        metadata: TritonAttentionMetadata,
        *,
        is_context: bool,
    ) -> tuple[Matrices, tuple[Any, Any]]:
        """Copy keys out of pages; return the rows as matrices, and descriptors of them."""
        spec, keys = self._spec, call.keys
        widths = (spec.head_size, spec.head_size_v)
        count = max(1, grid.prompts.num_keys or 0)
        rows = grid.room.rows(call.query, count, spec.num_kv_heads, widths)
        chunks = -(-grid.prompts.longest // COPIED_TOKENS)
        sources = call.tensors()[:2]
        self._copier(keys, is_context)(
            (metadata.num_reqs * chunks * spec.num_kv_heads, 1, 1),
            *sources,
            *rows,
            grid.blocks,
            metadata.block_table,
            metadata.key_lens,
            metadata.query_start_loc,
            metadata.num_reqs,
            grid.decode_tokens,
            0 if metadata.block_table is None else metadata.block_table.stride(0),
            chunks,
            count,
        )
        found = [token_matrix(each, count) for each in rows]
        matrices = [each for each in found if each is not None]
        first, second = (
            _describe(base, matrix, (grid.tile.keys, width))
            for base, matrix, width in zip(rows, matrices, widths, strict=True)
        )
        return (matrices[0], matrices[1]), (first, second)

    def _copier(self, keys: KeysValues, is_context: bool) -> Launcher:
        key = (keys.strides, keys.page, is_context)
        found = self._copiers.get(key)
        if found is None:
            from attn_triton.kernels.blocks import copy_pages

            names = ("K_BLOCK", "K_TOKEN", "K_HEAD", "V_BLOCK", "V_TOKEN", "V_HEAD")
            constants = {
                **dict(zip(names, (*keys.strides[0], *keys.strides[1]), strict=True)),
                "HK": self._spec.num_kv_heads,
                "D": self._spec.head_size,
                "DV": self._spec.head_size_v,
                "PAGE": keys.page,
                "FRESH": is_context,
                "ROWS": COPIED_TOKENS,
            }
            found = self._copiers[key] = Launcher(copy_pages, constants, num_warps=4)
        return found

    def _launch(
        self,
        call: PromptCall,
        grid: PromptGrid,
        metadata: TritonAttentionMetadata,
        route: Route,
        query: Matrix,
        fresh: Matrices | None,
        cached: Matrices | None,
        keys: tuple[Any, Any],
    ) -> None:
        spec, tile = self._spec, grid.tile
        new: tuple[Any, Any] = (None, None)
        if route.fresh is Fresh.NONE or fresh is None or call.fresh is None:
            fresh = None
        else:
            widths = (spec.head_size, spec.head_size_v)
            first, second = (
                _describe(base, matrix, (tile.keys, width))
                for base, matrix, width in zip(call.fresh, fresh, widths, strict=True)
            )
            new = (first, second)
        is_scaled = route.context is not Context.NONE
        mode = call.scales_mode if is_scaled else 0
        launcher = self._launcher(
            grid, metadata, route, query, call.output, fresh, cached if any(keys) else None, mode,
            call.keys.page,
        )  # fmt: skip
        table = metadata.block_table if route.context is Context.PAGES else None
        launcher(
            (grid.prompts.num_blocks * spec.num_heads, 1, 1),
            _describe(call.query, query, (tile.block, spec.head_size)),
            *keys,
            *new,
            call.output,
            call.lse,
            grid.blocks,
            table,
            metadata.key_lens,
            metadata.query_start_loc,
            metadata.causal_flags,
            call.sinks,
            *(call.scales if mode else (None, None)),
            metadata.num_reqs,
            grid.section_heads,
            0 if table is None else table.stride(0),
            0 if call.lse is None else call.lse.stride(0),
            call.scale,
            call.v_scale,
            call.cap,
        )

    def _launcher(
        self,
        grid: PromptGrid,
        metadata: TritonAttentionMetadata,
        route: Route,
        query: Matrix,
        output: Tensor,
        fresh: Matrices | None,
        cached: Matrices | None,
        scales_mode: int,
        page: int,
    ) -> Launcher:
        places = (
            query.head_columns,
            *output.stride()[:2],
            *((0, 0, 0) if cached is None else _place(cached[0])),
            *((0, 0, 0) if cached is None else _place(cached[1])),
            *((0, 0) if fresh is None else (each.head_columns for each in fresh)),
        )
        key = (grid.tile, route, page, places, metadata.causal, scales_mode)
        found = self._launchers.get(key)
        if found is None:
            found = self._launchers[key] = self._make(*key)
        return found

    def _make(
        self,
        tile: Any,
        route: Route,
        page: int,
        places: tuple[int, ...],
        causal: int,
        scales_mode: int,
    ) -> Launcher:
        from attn_triton.kernels.prompt import prompt

        spec, seen = self._spec, self._seen
        names = (
            "Q_HEAD", "O_TOKEN", "O_HEAD", "K_ROWS", "K_HEAD_ROWS", "K_HEAD",
            "V_ROWS", "V_HEAD_ROWS", "V_HEAD", "NEW_K_HEAD", "NEW_V_HEAD",
        )  # fmt: skip
        constants = {
            **dict(zip(names, places, strict=True)),
            "HQ": spec.num_heads,
            "HK": spec.num_kv_heads,
            "D": spec.head_size,
            "DV": spec.head_size_v,
            "BLOCK": tile.block,
            "BN": tile.keys,
            "TWO": tile.is_pair,
            "STAGES": tile.stages,
            "CONTEXT": int(route.context),
            "FRESH": int(route.fresh),
            "PAGE": page if route.context is Context.PAGES else 0,
            "LEFT": seen.left,
            "RIGHT": seen.right,
            "CHUNK": seen.chunk,
            "CAUSAL": causal,
            "SOFTCAP": spec.softcap is not None,
            "SCALES": scales_mode,
        }
        registers = {} if tile.max_registers is None else {"maxnreg": tile.max_registers}
        return Launcher(prompt, constants, num_warps=tile.num_warps, options=registers)


def _describe(base: Any, matrix: Matrix, tile: tuple[int, int]) -> Any:
    from attn_triton.kernels.describing import descriptor

    return descriptor(base, (matrix.rows, matrix.columns), matrix.stride, tile)


def _place(matrix: Matrix) -> tuple[int, int, int]:
    return matrix.block_rows, matrix.head_rows, matrix.head_columns


@functools.lru_cache(maxsize=256)
def _cache_matrices(keys: KeysValues, spec: LayerSpec) -> Matrices | None:
    key, value = (
        cache_matrix(address, strides, (keys.rows, keys.page, spec.num_kv_heads, width), size)
        for address, strides, width, size in zip(
            (keys.key, keys.value),
            keys.strides,
            (spec.head_size, spec.head_size_v),
            (keys.dtype.itemsize,) * 2,
            strict=True,
        )
    )
    return None if key is None or value is None else (key, value)
