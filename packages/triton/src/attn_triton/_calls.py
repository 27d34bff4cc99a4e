"""One layer's launches: constants fixed once, handles kept, few arguments per call."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from attn_shared.impl import AttentionLayer
from attn_shared.kv_cache import KVViews
from attn_shared.spec import LayerSpec
from attn_triton._metadata import TritonAttentionMetadata
from attn_triton._steps import Shape
from attn_triton._visibility import Visibility, visibility_of
from attn_triton.launch import Launcher
from attn_triton.machine import require_readable
from attn_triton.tiles import Tile, Widths

__all__ = ["KeysValues", "LayerCalls"]

_LOG2E = math.log2(math.e)
_COMBINE_PARTS = 32  # merged at a time; more than most waves cut a request into

Strides = tuple[int, int, int]
"""From one block to the next, one token, one head, in elements; without a cache 0 first."""


class KeysValues(NamedTuple):
    """Where keys and values are.

    Attributes:
        key, value: a cache's views, or the call's tensors.
        key_scales, value_scales: float32 scales beside each entry, or None.
        strides: of keys and of values.
        page: tokens per block; 0 without a cache.
    """

    key: Tensor
    value: Tensor
    key_scales: Tensor | None
    value_scales: Tensor | None
    strides: tuple[Strides, Strides]
    page: int

    @classmethod
    def of_cache(cls, views: KVViews) -> KeysValues:
        """Return those of a paged cache."""
        strides = tuple(tuple(view.stride()[:3]) for view in views[:2])
        return cls(*views, strides=strides, page=views.key.shape[1])  # type: ignore[arg-type]

    @classmethod
    def of_call(cls, key: Tensor, value: Tensor) -> KeysValues:
        """Return those that come with a call; (keys, Hkv, D)."""
        key, value = (rows if rows.stride(-1) == 1 else rows.contiguous() for rows in (key, value))
        strides = tuple((0, rows.stride(0), rows.stride(1)) for rows in (key, value))
        return cls(key, value, None, None, strides, 0)  # type: ignore[arg-type]


class _Key(NamedTuple):
    """What the machine code of a call depends on, beside the layer."""

    shape: Shape
    query: tuple[int, ...]
    output: tuple[int, ...]
    strides: tuple[Strides, Strides]
    page: int
    causal: int
    scales: int


class LayerCalls:
    """Runs the kernels of one layer.

    Args:
        spec: of the layer.
    """

    def __init__(self, spec: LayerSpec) -> None:
        self._spec = spec
        self.visibility: Visibility = visibility_of(spec)
        self._launchers: dict[_Key, _Launchers] = {}
        widths = Widths(
            head_size=spec.head_size,
            head_size_v=spec.head_size_v,
            element_bytes=spec.dtype.itemsize,
            cache_bytes=spec.dtype.itemsize,
        )
        self._padded = widths.padded
        self._scale, self._cap = _scales_of(spec)

    def run(
        self,
        layer: AttentionLayer,
        query: Tensor,
        output: Tensor,
        lse: Tensor | None,
        keys: KeysValues,
        metadata: TritonAttentionMetadata,
    ) -> None:
        """Launch what the step needs."""
        scales = self._scale_arguments(layer, keys, query.device)
        key = _Key(
            metadata.shape,
            query.stride()[:2],
            output.stride()[:2],
            keys.strides,
            keys.page,
            metadata.causal,
            scales.mode,
        )
        launchers = self._launchers.get(key)
        if launchers is None:
            require_readable(keys.key.dtype, query.device)
            launchers = self._launchers[key] = self._make(key, is_int8=keys.key_scales is not None)
        plan = metadata.plans[self.visibility]
        lse_stride = 0 if lse is None else lse.stride(0)
        numbers = (self._scale * scales.k, scales.v, self._cap)
        if metadata.decode is not None and launchers.decode is not None:
            grid = metadata.decode
            columns = self._spec.num_kv_heads * grid.blocks
            is_split = grid.may_split
            launchers.decode(
                (grid.max_items * columns, 1, 1),
                query,
                keys.key,
                keys.value,
                output,
                lse,
                metadata.parts if is_split else None,
                metadata.stats if is_split else None,
                plan,
                metadata.block_table,
                metadata.key_lens,
                metadata.query_start_loc,
                metadata.causal_flags,
                layer.sinks,
                layer.alibi_slopes,
                scales.k_tensor,
                scales.v_tensor,
                metadata.num_reqs,
                grid.max_items,
                grid.max_rows,
                0 if metadata.block_table is None else metadata.block_table.stride(0),
                lse_stride,
                *numbers,
            )
            if is_split and launchers.combine is not None:
                launchers.combine(
                    (metadata.num_reqs * self._spec.num_kv_heads * grid.max_rows, 1, 1),
                    output,
                    lse,
                    metadata.parts,
                    metadata.stats,
                    plan,
                    metadata.query_start_loc,
                    layer.sinks,
                    metadata.num_reqs,
                    grid.max_items,
                    grid.max_rows,
                    lse_stride,
                )
        if metadata.num_blocks and launchers.prefill is not None:
            ranges = metadata.ranges
            launchers.prefill(
                (metadata.num_blocks * self._spec.num_kv_heads, 1, 1),
                query,
                keys.key,
                keys.value,
                output,
                lse,
                plan,
                metadata.block_table,
                metadata.key_lens,
                metadata.query_start_loc,
                metadata.causal_flags,
                ranges,
                layer.sinks,
                layer.alibi_slopes,
                scales.k_tensor,
                scales.v_tensor,
                metadata.num_reqs,
                metadata.max_items,
                0 if metadata.block_table is None else metadata.block_table.stride(0),
                lse_stride,
                0 if ranges is None else ranges.shape[1],
                *numbers,
            )

    def _scale_arguments(
        self, layer: AttentionLayer, keys: KeysValues, device: torch.device
    ) -> _Scales:
        if keys.key_scales is not None:
            return _Scales(0, 1.0, 1.0, keys.key_scales, keys.value_scales)
        k, v = layer.k_scale, layer.v_scale
        if not isinstance(k, Tensor) and not isinstance(v, Tensor):
            return _Scales(0, float(k), float(v), None, None)
        if self._takes_no_scales:
            return _NO_SCALES
        k, v = (_as_tensor(scale, device) for scale in (k, v))
        heads = self._spec.num_kv_heads
        if k.numel() == v.numel() == 1:
            return _Scales(1, 1.0, 1.0, k, v)
        return _Scales(2, 1.0, 1.0, _spread(k, heads), _spread(v, heads))

    @property
    def _takes_no_scales(self) -> bool:
        cache = self._spec.kv_cache_spec
        return not getattr(cache, "is_quantized", False)

    def _make(self, key: _Key, *, is_int8: bool) -> _Launchers:
        from attn_triton.kernels.combine import combine
        from attn_triton.kernels.decode import decode
        from attn_triton.kernels.prefill import prefill

        shape = key.shape
        heads = self._heads()
        output = dict(zip(("O_TOKEN", "O_HEAD"), key.output, strict=True))
        own = self._constants(key, is_int8) | heads | output
        merged = heads | output | {"PARTS": _COMBINE_PARTS}
        del merged["D"], merged["DP"]
        found = _Launchers(None, None, None)
        if shape.decode is not None:
            blocks = {"BLOCKS": shape.blocks}
            found = found._replace(
                decode=_launcher(decode, shape.decode, own | blocks),
                combine=Launcher(combine, merged),
            )
        if shape.prefill is not None:
            found = found._replace(prefill=_launcher(prefill, shape.prefill, own))
        return found

    def _heads(self) -> dict[str, object]:
        spec, (padded, padded_v) = self._spec, self._padded
        return {
            "HQ": spec.num_heads,
            "HK": spec.num_kv_heads,
            "D": spec.head_size,
            "DV": spec.head_size_v,
            "DP": padded,
            "DVP": padded_v,
        }

    def _constants(self, key: _Key, is_int8: bool) -> dict[str, object]:
        names = ("K_BLOCK", "K_TOKEN", "K_HEAD", "V_BLOCK", "V_TOKEN", "V_HEAD")
        seen = self.visibility
        return {
            **dict(zip(names, (*key.strides[0], *key.strides[1]), strict=True)),
            **dict(zip(("Q_TOKEN", "Q_HEAD"), key.query, strict=True)),
            "PAGE": key.page,
            "LEFT": seen.left,
            "RIGHT": seen.right,
            "CHUNK": seen.chunk,
            "CAUSAL": key.causal,
            "SOFTCAP": self._spec.softcap is not None,
            "SCALES": key.scales,
            "INT8": is_int8,
        }


class _Launchers(NamedTuple):
    decode: Launcher | None
    combine: Launcher | None
    prefill: Launcher | None


class _Scales(NamedTuple):
    """Scales of a cache as the kernels take them: numbers, or tensors where it is not known."""

    mode: int
    k: float
    v: float
    k_tensor: Tensor | None
    v_tensor: Tensor | None


_NO_SCALES = _Scales(0, 1.0, 1.0, None, None)


def _launcher(kernel: object, tile: Tile, constants: dict[str, object]) -> Launcher:
    shape = {"ROWS": tile.rows, "BN": tile.keys, "STAGES": tile.stages}
    registers = {} if tile.max_registers is None else {"maxnreg": tile.max_registers}
    return Launcher(kernel, constants | shape, num_warps=tile.num_warps, options=registers)


def _scales_of(spec: LayerSpec) -> tuple[float, float]:
    """Return the kernels' `scale` and `cap`: logits are in units of log2."""
    if spec.softcap is None:
        return spec.scale * _LOG2E, 1.0
    return spec.scale / spec.softcap, spec.softcap * _LOG2E


def _as_tensor(scale: float | Tensor, device: torch.device) -> Tensor:
    if isinstance(scale, Tensor):
        return scale.to(device=device, dtype=torch.float32)
    return torch.full((1,), scale, dtype=torch.float32, device=device)


def _spread(scale: Tensor, num_heads: int) -> Tensor:
    return scale if scale.numel() == num_heads else scale.reshape(1).repeat(num_heads)
