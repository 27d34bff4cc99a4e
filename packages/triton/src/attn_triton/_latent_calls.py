"""One layer's launches over latents: constants fixed once, handles kept, few arguments per call."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attn_shared.errors import InvalidInputError
from attn_shared.impl import AttentionLayer
from attn_shared.request import MLADims
from attn_shared.signed_scale import Scale
from attn_shared.spec import LayerSpec
from attn_triton._latent_cache import LatentCache, LatentCaches
from attn_triton._latent_metadata import TritonMLADecode
from attn_triton._noting import PendingHandle
from attn_triton.latent_route import LatentRoute, latent_route
from attn_triton.latent_tiles import COMBINE_COLUMNS, COMBINE_ROWS, LatentWidths
from attn_triton.launch import AddressedLaunch, Handle, Launcher, is_current
from attn_triton.machine import machine_of, require_readable
from attn_triton.tiles import Tile

__all__ = ["LatentCalls", "scale_of"]

_LOG2E = math.log2(math.e)
_ALIGNMENT = 15  # bits of an address that must be 0 for the widest accesses


class _Key(NamedTuple):
    """What machine code depends on, beside the layer."""

    tile: Tile
    query: tuple[int, ...]
    output: tuple[int, ...]
    cache: tuple[int, int]
    page: int
    causal: bool
    route: LatentRoute
    parts_at_once: int


_Handles = tuple[Handle | PendingHandle, Handle | PendingHandle | None]
"""Of decode, and of the merging kernel where one runs."""


class _Programs(NamedTuple):
    """The kernels of one layer for calls of one kind.

    Attributes:
        decode, combine: look at each tensor.
        handles: by whether nothing is cut, no LSE is wanted, the scale is a number: take addresses.
    """

    decode: AddressedLaunch
    combine: AddressedLaunch
    handles: dict[tuple[bool, bool, bool], _Handles]


class LatentCalls:
    """Runs the kernels of one layer.

    Args:
        spec: of the layer.
    """

    def __init__(self, spec: LayerSpec) -> None:
        self._spec = spec
        dims = spec.mla or MLADims()
        self._widths = (dims.kv_lora_rank, dims.qk_rope_head_dim)
        size = spec.dtype.itemsize
        self._sign = Scale(spec.scale)  # the kernels mask before they scale
        self._scale = self._sign.value * _LOG2E
        self._padded = LatentWidths(
            latent=self._widths[0], rope=self._widths[1], element_bytes=size, cache_bytes=size
        ).padded
        self._caches = LatentCaches()
        self._programs: dict[_Key, _Programs] = {}

    def run(
        self,
        layer: AttentionLayer,
        query: Tensor,
        output: Tensor,
        lse: Tensor | None,
        kv_cache: Tensor,
        step: TritonMLADecode,
    ) -> None:
        """Launch what the decodes need.

        Args:
            layer: the calling layer.
            query: (T, H, latent + rope), its last dimension dense.
            output: (T, H, latent), likewise.
            lse: (H, T), likewise, or None.
            kv_cache: (blocks, page, latent + rope).
            step: of the batch.
        """
        query = self._sign.signed(query)
        cache = self._caches.read(kv_cache)
        tile = step.grid.tile
        route, tiles = cache.chosen.get(tile) or self._choose(cache, kv_cache, tile)
        key = _Key(
            tile,
            query.stride(),
            output.stride(),
            cache.strides,
            cache.page,
            step.causal,
            route,
            step.parts_at_once,
        )
        programs = self._programs.get(key)
        if programs is None:
            require_readable(cache.dtype, query.device)
            programs = self._programs[key] = self._make(key, query.device)
        scale, cache_scale = scale_of(layer.k_scale, query.device)
        lse_stride = 0 if lse is None else lse.stride(0)
        numbers = (*step.decode.numbers, lse_stride, self._scale, cache_scale)
        presence = (step.combine is None, lse is None, scale is None)
        places = _addresses(query, output, lse, scale)
        bits = cache.address | places[0] | places[1] | (places[2] or 0) | (places[3] or 0)
        is_aligned = step.is_aligned and not bits & _ALIGNMENT
        handles = programs.handles.get(presence) if is_aligned else None
        if handles is not None and is_current(handles[0]):
            _launch(handles, step, places, (cache.address, *tiles), numbers)
            return
        tensors = (query, kv_cache, *tiles, output, lse, *step.decode.tensors, scale)
        programs.decode(step.decode.grid, tensors, numbers)
        merged: tuple[Any, ...] = ()
        if step.combine is not None:
            merged = (output, lse, *step.combine.tensors, *_sinks(step))
            programs.combine(step.combine.grid, merged, (*step.combine.numbers, lse_stride))
        if is_aligned and not programs.decode.is_interpreted:
            programs.handles[presence] = _handles_of(programs, step, tensors, merged, numbers)

    def _choose(
        self, cache: LatentCache, kv_cache: Tensor, tile: Tile
    ) -> tuple[LatentRoute, tuple[Any, Any]]:
        """Return which kernel reads a cache, and its descriptors, and remember both."""
        from attn_triton.kernels.compiling import has_gluon

        route = latent_route(
            machine_of(cache.device).arch,
            tile,
            self._spec.dtype,
            cache.dtype,
            self._padded,
            is_describable=cache.can_be_described(tile.keys, self._widths[0]),
            has_gluon=has_gluon(),
        )
        tiles: tuple[Any, Any] = (None, None)
        if route is not LatentRoute.ROWS:
            tiles = cache.tiles(kv_cache, tile.keys, self._widths, self._padded, route)
        if cache.device.type != "cpu":  # a descriptor of the interpreter would hold the cache
            cache.chosen[tile] = (route, tiles)
        return route, tiles

    def _make(self, key: _Key, device: torch.device) -> _Programs:
        has_dependent = machine_of(device).has_dependent_launch
        # The kernel for Hopper lost by it: 94.3 us instead of 92.9 at 32x4096 and 128 heads.
        is_dependent = None if key.route is LatentRoute.HOPPER else has_dependent
        places = {
            "HQ": self._spec.num_heads,
            "O_TOKEN": key.output[0],
            "O_HEAD": key.output[1],
        }
        constants = {
            **places,
            **dict(zip(("DL", "DR"), self._widths, strict=True)),
            **dict(zip(("DLP", "DRP"), self._padded, strict=True)),
            **dict(zip(("Q_TOKEN", "Q_HEAD"), key.query[:2], strict=True)),
            **dict(zip(("K_BLOCK", "K_TOKEN"), key.cache, strict=True)),
            "ROWS": key.tile.rows,
            "BN": key.tile.keys,
            "STAGES": key.tile.stages,
            "PAGE": key.page,
            "CAUSAL": int(key.causal),
        }
        decode = Launcher(
            _kernel_of(key.route),
            constants,
            num_warps=key.tile.num_warps,
            is_dependent=is_dependent,
        )
        merger = self._merger(key, places, bool(is_dependent))
        return _Programs(AddressedLaunch(decode), AddressedLaunch(merger), {})

    def _merger(self, key: _Key, places: dict[str, int], is_dependent: bool) -> Launcher:
        from attn_triton.kernels.combine import combine
        from attn_triton.kernels.combine_rows import combine_rows

        padded = self._padded[0]
        common = places | {"DV": self._widths[0], "DVP": padded}
        if not key.parts_at_once:
            return Launcher(combine_rows, common | {"ROWS": COMBINE_ROWS}, num_warps=4)
        columns = {"HK": 1, "BV": min(padded, COMBINE_COLUMNS), "PARTS": key.parts_at_once}
        return Launcher(combine, common | columns, num_warps=1, is_dependent=is_dependent)


def _kernel_of(route: LatentRoute) -> Any:
    if route is LatentRoute.HOPPER:
        from attn_triton.kernels.mla_decode_hopper import mla_decode_hopper

        return mla_decode_hopper
    from attn_triton.kernels.mla_decode import mla_decode

    return mla_decode


def _addresses(
    query: Tensor, output: Tensor, lse: Tensor | None, scale: Tensor | None
) -> tuple[int, int, int | None, int | None]:
    return (
        query.data_ptr(),
        output.data_ptr(),
        None if lse is None else lse.data_ptr(),
        None if scale is None else scale.data_ptr(),
    )


def _launch(
    handles: _Handles,
    step: TritonMLADecode,
    places: tuple[int, int, int | None, int | None],
    cache: tuple[Any, ...],
    numbers: tuple[float, ...],
) -> None:
    """Launch by addresses.

    Args:
        handles: of the kernels.
        step: what they are handed.
        places: of query, output, LSE and scale.
        cache: address and descriptors of the cache.
        numbers: of decode; the LSE's stride is the third from the end.
    """
    query, output, lse, scale = places
    decode, combine = handles
    launch = step.decode
    decode(launch.grid, query, *cache, output, lse, *launch.addresses, scale, *numbers)
    if combine is not None and step.combine is not None:
        launch = step.combine
        rest = (*launch.addresses, *_sinks(step), *launch.numbers, numbers[-3])
        combine(launch.grid, output, lse, *rest)


def _handles_of(
    programs: _Programs,
    step: TritonMLADecode,
    tensors: tuple[Any, ...],
    merged: tuple[Any, ...],
    numbers: tuple[float, ...],
) -> _Handles:
    """Return what a call with these tensors was launched by, had all of them been aligned."""
    decode = programs.decode.handle(tensors, numbers)
    if step.combine is None:
        return decode, None
    own = (*step.combine.numbers, numbers[-3])
    return decode, programs.combine.handle(merged, own)


def _sinks(step: TritonMLADecode) -> tuple[None, ...]:
    """Return the place of sinks, which `combine` has and `combine_rows` has not."""
    return (None,) if step.parts_at_once else ()


def scale_of(scale: float | Tensor, device: torch.device) -> tuple[Tensor | None, float]:
    """Return the scale of a cache's entries as a tensor, or as a number where it is one.

    Raises:
        InvalidInputError: it is neither a number nor one element.
    """
    if not isinstance(scale, Tensor):
        return None, float(scale)
    if scale.numel() != 1:
        raise InvalidInputError.for_argument(
            "layer.k_scale", f"a tensor {tuple(scale.shape)}", "a number or one element"
        )
    return scale.to(device=device, dtype=torch.float32), 1.0
