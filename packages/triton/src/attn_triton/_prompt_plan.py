"""What a builder does for long prompts: when their kernel runs, and its list of blocks."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor

from attn_shared.metadata import CommonAttentionMetadata
from attn_shared.spec import LayerSpec
from attn_triton._prompts import CopyRoom, PromptGrid, blocks_size, kind_of, prompts_of
from attn_triton._route import (
    LEAST_TOKENS,
    MOST_COPIED_BYTES,
    plain_because,
    portable_because,
    tile_of,
)
from attn_triton._steps import Planner
from attn_triton.launch import AlignedLaunch, Launcher
from attn_triton.machine import Machine
from attn_triton.prompt_tiles import PromptKernel, section_heads

__all__ = ["PromptPlanner", "block_listing"]

_PROGRAMS_PER_UNIT = 2  # that the shapes for heads of 128 leave room for


class PromptPlanner:
    """Plans the long prompts of a group of layers.

    Args:
        layers: of the group.
        machine: the device.
        planner: of the group's other launches.
        cache_dtype: of the layers' caches.
        device: where lists of blocks go.
        is_cache_free: keys come with the call.
        allows_fresh: fresh keys may stand for those of a quantised cache.
    """

    def __init__(
        self,
        layers: Iterable[LayerSpec],
        machine: Machine,
        planner: Planner,
        cache_dtype: torch.dtype,
        device: torch.device,
        *,
        is_cache_free: bool,
        allows_fresh: bool,
    ) -> None:
        layers = list(layers)
        self._layer = layers[0]
        self._device = device
        self._planner = planner
        self._cache_bytes = machine.cache_bytes
        self._is_cache_free = is_cache_free
        # In batch-invariant mode whether there is context must make no difference.
        self._allows_fresh = allows_fresh and not planner.is_invariant
        self._room = CopyRoom()
        is_served = any(
            plain_because(each, machine.arch, cache_dtype, is_invariant=planner.is_invariant)
            is None
            for each in layers
        )
        kernel = _kernel_for(layers, machine)
        self._tile = tile_of(self._layer, machine.arch, kernel=kernel) if is_served else None
        few = tile_of(self._layer, machine.arch, is_few=True)
        if kernel is PromptKernel.HOPPER:  # 22.4 us instead of 26.4 for 1x1024 in a graph
            few = self._tile
        # In batch-invariant mode the shape of a tile must not depend on the company.
        self._few = self._tile if planner.is_invariant else few
        self._units = machine.compute_units
        self._wave = _PROGRAMS_PER_UNIT * machine.compute_units

    def grid(
        self, common: CommonAttentionMetadata, decode_tokens: int, *, is_bound: bool
    ) -> PromptGrid | None:
        """Return how a batch's long prompts run; None where the plain kernel runs them.

        Args:
            common: the batch.
            decode_tokens: query tokens up to which a request decodes.
            is_bound: return bounds for every batch of as many requests and tokens.
        """
        tile, planner, layer = self._tile, self._planner, self._layer
        is_short = common.max_query_len < LEAST_TOKENS and not planner.is_invariant
        if tile is None or is_short:
            return None
        known = partial(
            prompts_of,
            common,
            most_tokens=decode_tokens,
            attn_type=layer.attn_type,
            is_bound=is_bound or planner.is_invariant,
        )
        prompts = known(rows=tile.rows)
        if prompts.num_blocks * layer.num_heads <= self._wave and self._few not in (None, tile):
            tile = self._few
            prompts = known(rows=tile.rows)
        size = blocks_size(common.num_reqs, prompts.num_blocks)
        return PromptGrid(
            kind=kind_of(
                tile,
                has_context=prompts.has_context,
                may_copy=self._may_copy(prompts.num_keys),
                is_invariant=planner.is_invariant,
                allows_fresh=self._allows_fresh,
            ),
            blocks=torch.empty(size, dtype=torch.int32, device=self._device),
            prompts=prompts,
            decode_tokens=decode_tokens,
            section_heads=section_heads(
                layer.num_kv_heads,
                layer.queries_per_kv,
                planner.widths,
                prompts.longest,
                self._cache_bytes,
            ),
            room=self._room,
            compute_units=self._units,
        )

    def _may_copy(self, num_keys: int | None) -> bool:
        layer = self._layer
        width = layer.num_kv_heads * (layer.head_size + layer.head_size_v)
        most = MOST_COPIED_BYTES // (width * layer.dtype.itemsize)
        return num_keys is not None and num_keys <= most

    def fill(
        self, grid: PromptGrid, query_starts: Tensor, lens: Tensor, most_requests: int
    ) -> None:
        """Have the device list the blocks.

        Args:
            grid: from `grid`.
            query_starts: (B + 1,) int32.
            lens: (B,) int32 keys, or (B + 1,) prefix sums of them.
            most_requests: a power of two that is not below B.
        """
        numbers = (
            len(query_starts) - 1,
            grid.prompts.num_blocks,
            grid.decode_tokens,
            grid.kind.tile.rows,
        )
        launch = block_listing(self._is_cache_free, most_requests)
        launch((1, 1, 1), (grid.blocks, query_starts, lens), numbers)


def _kernel_for(layers: Iterable[LayerSpec], machine: Machine) -> PromptKernel:
    """Return the kernel that runs all layers of a group, which have their blocks in common."""
    if all(portable_because(each, machine.arch, has_gluon=True) is None for each in layers):
        from attn_triton.kernels.compiling import has_gluon

        return PromptKernel.HOPPER if has_gluon() else PromptKernel.PORTABLE
    return PromptKernel.PORTABLE


@functools.cache
def block_listing(is_prefix: bool, block: int) -> AlignedLaunch:
    """Return what lists the blocks of steps of at most `block` requests.

    Args:
        is_prefix: keys come with the call.
        block: a power of two.
    """
    from attn_triton.kernels.blocks import plan_blocks

    return AlignedLaunch(Launcher(plan_blocks, {"PREFIX": is_prefix, "BLOCK_B": block}))
