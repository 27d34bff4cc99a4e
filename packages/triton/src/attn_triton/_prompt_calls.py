"""One layer's launches of the kernel for long prompts: descriptors made, few looks per call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from attn_shared.spec import LayerSpec
from attn_triton._keys import KeysValues, KeysValuesTensors
from attn_triton._metadata import Launch, TritonAttentionMetadata
from attn_triton._prompt_programs import Matrices, PromptProgram, program_for
from attn_triton._prompts import COPIED_TOKENS, PromptGrid
from attn_triton._route import Context
from attn_triton._visibility import Visibility

__all__ = ["PromptCalls"]

_ALIGNMENT = 15  # bits of an address that must be 0 for descriptors and the widest accesses
_MOST_CACHES = 64  # whose descriptors are kept

_Own = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Sinks, and scales of keys and values."""


class PromptCalls:
    """Runs the kernel for long prompts, for one layer.

    Args:
        spec: of the layer.
        visibility: of its queries.
    """

    def __init__(self, spec: LayerSpec, visibility: Visibility) -> None:
        self._spec = spec
        self._seen = visibility
        self._programs: dict[Any, PromptProgram | None] = {}
        self._widths = (spec.head_size, spec.head_size_v)
        self._described: dict[Any, tuple[Any, Any]] = {}
        self._current_device: Callable[[], int] | None = None

    def prepared(
        self,
        query: Tensor,
        output: Tensor,
        lse: Tensor | None,
        fresh: tuple[Tensor, Tensor] | None,
        keys: KeysValues,
        tensors: Callable[[], KeysValuesTensors],
        own: _Own,
        numbers: tuple[float, float],
        scales: tuple[int, float, float],
        metadata: TritonAttentionMetadata,
    ) -> Callable[[], None] | None:
        """Return what launches it; None where the plain kernel has to run instead.

        Args:
            query: (T, Hq, D).
            output: (T, Hq, Dv).
            lse: (Hq, T), or None.
            fresh: the step's keys and values, (T, Hkv, D) and (T, Hkv, Dv), which may be read in
                the cache's stead, or None.
            keys: where the cached ones are.
            tensors: returns the same as tensors.
            own: the layer's sinks and scales.
            numbers: factor on logits, and the cap on them.
            scales: of the cache: 0 as numbers, 1 per tensor, 2 per kv head; those of keys and of
                values as numbers.
            metadata: the step.
        """
        grid = metadata.prompts
        if grid is None:
            return None
        program = self._program(grid, query, output, fresh, keys, metadata.causal, scales[0])
        if program is None:
            return None
        call = (query, output, lse, fresh, keys, tensors, own, numbers, scales, metadata)
        return partial(self._run, program, grid, *call)

    def _run(
        self,
        program: PromptProgram,
        grid: PromptGrid,
        query: Tensor,
        output: Tensor,
        lse: Tensor | None,
        fresh: tuple[Tensor, Tensor] | None,
        keys: KeysValues,
        tensors: Callable[[], KeysValuesTensors],
        own: _Own,
        numbers: tuple[float, float],
        scales: tuple[int, float, float],
        metadata: TritonAttentionMetadata,
    ) -> None:
        if program.route.context is Context.NONE:
            cached, own, scales = (None, None), (own[0], None, None), (0, 1.0, 1.0)
        elif program.route.context is Context.PAGES:
            cached = self._of_cache(program, keys, tensors)
        else:
            cached = self._copied(program, grid, query, tensors, metadata)
        new = (None, None)
        if program.fresh is not None and fresh is not None:
            tokens = metadata.num_keys or metadata.num_actual_tokens
            new = _describe_pair(program, fresh, program.fresh, tokens, self._widths)
        rows = (metadata.num_actual_tokens, program.tile.block, self._spec.head_size)
        described = (_describe(program, query, program.query, *rows), *cached, *new)
        launch = metadata.prompt_launch(grid, self._spec.num_heads)
        factors = (numbers[0] * scales[1], scales[2], numbers[1])
        self._launch(program, launch, described, (output, lse), own, factors)

    def _program(
        self,
        grid: PromptGrid,
        query: Tensor,
        output: Tensor,
        fresh: tuple[Tensor, Tensor] | None,
        keys: KeysValues,
        causal: int,
        scales_mode: int,
    ) -> PromptProgram | None:
        strides, bits = None, 0
        if fresh is not None:
            strides = (fresh[0].stride(), fresh[1].stride())
            bits = (fresh[0].data_ptr() | fresh[1].data_ptr()) & _ALIGNMENT
        key = (
            grid.kind,
            query.stride(),
            query.data_ptr() & _ALIGNMENT,
            output.stride(),
            strides,
            bits,
            keys.places,
            keys.dtype,
            keys.bits & _ALIGNMENT,
            causal,
            scales_mode,
        )
        if key not in self._programs:
            self._programs[key] = program_for(
                self._spec, self._seen, grid, query, output, fresh, keys, causal, scales_mode
            )
        return self._programs[key]

    def _of_cache(
        self,
        program: PromptProgram,
        keys: KeysValues,
        tensors: Callable[[], KeysValuesTensors],
    ) -> tuple[Any, Any]:
        """Return descriptors of a cache; by address, they keep it neither alive nor in doubt."""
        tile = program.tile
        key = (keys.key, keys.value, keys.rows, keys.strides, tile.keys, tile.kernel)
        found = self._described.get(key)
        if found is None:
            if program.cached is None:
                raise TypeError("a route over pages has matrices of the cache")
            views = tensors()[:2]
            found = tuple(
                _describe(program, view, matrix, _rows_of(matrix, keys), *tile.cached(width))
                for view, matrix, width in zip(views, program.cached, self._widths, strict=True)
            )
            if keys.device.type != "cpu":  # there they are tensors
                if len(self._described) >= _MOST_CACHES:
                    self._described.clear()
                self._described[key] = found
        return found

    def _copied(
        self,
        program: PromptProgram,
        grid: PromptGrid,
        query: Tensor,
        tensors: Callable[[], KeysValuesTensors],
        metadata: TritonAttentionMetadata,
    ) -> tuple[Any, Any]:
        """Copy keys out of pages, and return descriptors of the rows that they are in then."""
        table, copier = metadata.block_table, program.copier
        if table is None or copier is None or program.cached is None:
            raise TypeError("a route over rows has a table, a copier and matrices")
        spec, count = self._spec, max(1, grid.prompts.num_keys or 0)
        rows = grid.room.rows(query, count, spec.num_kv_heads, self._widths)
        chunks = -(-grid.prompts.longest // COPIED_TOKENS)
        step = (grid.blocks, table, metadata.key_lens, metadata.query_start_loc)
        copier(
            (metadata.num_reqs * chunks * spec.num_kv_heads, 1, 1),
            (*tensors()[:2], *rows, *step),
            (metadata.num_reqs, grid.decode_tokens, table.stride(0), chunks, count),
        )
        return _describe_pair(program, rows, program.cached, count, self._widths)

    def _launch(
        self,
        program: PromptProgram,
        launch: Launch,
        described: Sequence[Any],
        call: tuple[Tensor, Tensor | None],
        own: _Own,
        numbers: tuple[float, float, float],
    ) -> None:
        """Launch by the handle where all that it relies on is so, else by the launcher."""
        output, lse = call
        rest = (*launch.numbers, 0 if lse is None else lse.stride(0), *numbers)
        places = [None if each is None else each.data_ptr() for each in (output, lse, *own)]
        is_aligned = launch.is_aligned and not any(
            place & _ALIGNMENT for place in places if place is not None
        )
        handle = program.handles.get((lse is None, own[1] is None)) if is_aligned else None
        if handle is not None and handle.device_index == self._device():
            handle(launch.grid, *described, *places[:2], *launch.addresses, *places[2:], *rest)
            return
        arguments = (*described, *call, *launch.tensors, *own, *rest)
        program.launcher(launch.grid, *arguments)
        if is_aligned and not program.launcher.is_interpreted:
            handle = program.launcher.handle(*arguments)
            program.handles[lse is None, own[1] is None] = handle

    def _device(self) -> int:
        """Return the current device's index."""
        if self._current_device is None:
            from attn_triton.kernels.compiling import driver_calls

            self._current_device = driver_calls()[1]
        return self._current_device()


def _rows_of(matrix: Any, keys: KeysValues) -> int:
    """Return the rows of a cache of so many blocks."""
    rows: int = matrix.rows + (keys.rows - 1) * matrix.block_rows
    return rows


def _describe_pair(
    program: PromptProgram,
    tensors: Sequence[Tensor],
    matrices: Matrices,
    rows: int,
    widths: tuple[int, int],
) -> tuple[Any, Any]:
    tile = program.tile.keys
    return (
        _describe(program, tensors[0], matrices[0], rows, tile, widths[0]),
        _describe(program, tensors[1], matrices[1], rows, tile, widths[1]),
    )


def _describe(
    program: PromptProgram, tensor: Tensor, matrix: Any, rows: int, tile: int, width: int
) -> Any:
    shape = [rows, matrix.columns]
    return program.describe(tensor, tensor.data_ptr(), shape, matrix.stride, (tile, width))
