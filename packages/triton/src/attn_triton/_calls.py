"""One layer's launches: constants fixed once, handles kept, few arguments per call."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attn_shared.errors import InvalidInputError
from attn_shared.impl import AttentionLayer
from attn_shared.spec import LayerSpec
from attn_triton._capability import NAME
from attn_triton._keys import KeysValues, KeysValuesTensors, Places
from attn_triton._metadata import Step, TritonAttentionMetadata
from attn_triton._noting import PendingHandle
from attn_triton._overlap import SideStream
from attn_triton._prompt_calls import PromptCalls
from attn_triton._steps import Shape
from attn_triton._visibility import Visibility, visibility_of
from attn_triton.launch import Handle, Launcher
from attn_triton.machine import machine_of, require_readable
from attn_triton.tiles import COMBINE_PARTS, Tile, Widths, combine_warps

__all__ = ["LayerCalls"]

_LOG2E = math.log2(math.e)
_ALIGNMENT = 15  # bits of an address that must be 0 for the widest accesses


_Kind = tuple[tuple[int, ...], tuple[int, ...], Places, int, int]
"""What machine code depends on, beside layer and shape: strides of query and output, places of keys
and values, causality and how scales are given."""

_Key = tuple[Shape, tuple[int, ...], tuple[int, ...], Places, int, int]
"""The step's shape and the kind of a call."""

_Refs = Sequence[Tensor | int | None]
"""Tensors, or their addresses."""

_Own = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]

_NOTHING = (None, None, None, None)
"""Sinks, slopes and scales of a layer that has none."""

_TENSORS, _ADDRESSES = 1, 2  # fields of a `Launch`

_NO_LSE = -1  # its stride where none is wanted: one machine code for steps with it and without


class _Scales(NamedTuple):
    """Scales of a cache as the kernels take them: numbers, or tensors where it is not known."""

    mode: int
    k: float
    v: float
    k_tensor: Tensor | None
    v_tensor: Tensor | None


_NO_SCALES = _Scales(0, 1.0, 1.0, None, None)


class LayerCalls:
    """Runs the kernels of one layer.

    Where every tensor is 16-byte aligned, as nearly always, a call finds its compiled handles by
    one look-up and hands them addresses; any other goes through the launchers, which look at each
    tensor.

    Args:
        spec: of the layer.
    """

    def __init__(self, spec: LayerSpec) -> None:
        self._spec = spec
        self.visibility: Visibility = visibility_of(spec)
        self._programs: dict[_Key, _Programs] = {}
        widths = Widths(
            head_size=spec.head_size,
            head_size_v=spec.head_size_v,
            element_bytes=spec.dtype.itemsize,
            cache_bytes=spec.dtype.itemsize,
        )
        self._padded = widths.padded
        self._scale, self._cap = _scales_of(spec)
        self._prompts = PromptCalls(spec, self.visibility)
        self._takes_scales = bool(getattr(spec.kv_cache_spec, "is_quantized", False))
        has_inline = bool(getattr(spec.kv_cache_spec, "has_inline_scales", False))
        self._has_own = spec.has_sinks or spec.has_alibi or has_inline

    def planned(self, metadata: TritonAttentionMetadata) -> Step:
        """Return the step's launches for such layers.

        Raises:
            InvalidInputError: there are none.
        """
        step = metadata.step(self.visibility)
        if step is None:
            raise InvalidInputError.for_argument(
                "metadata",
                f"planned for {list(metadata.plans)}",
                f"a plan for {self.visibility}",
                hint=f"build it with a {NAME} builder that was given this layer.",
            )
        return step

    def run(
        self,
        layer: AttentionLayer,
        query: Tensor,
        output: Tensor,
        lse: Tensor | None,
        keys: KeysValues,
        tensors: Callable[[], KeysValuesTensors],
        fresh: tuple[Tensor, Tensor] | None,
        metadata: TritonAttentionMetadata,
        step: Step,
    ) -> None:
        """Launch what the step needs.

        Args:
            layer: the calling layer.
            query: (T, Hq, D).
            output: (T, Hq, Dv).
            lse: (Hq, T), or None.
            keys: where keys and values are.
            tensors: returns the same as tensors, for calls that are looked at.
            fresh: the step's keys and values, which may be read in the cache's stead, or None.
            metadata: the step.
            step: its launches, from `planned`.
        """
        of_query, of_output = query.stride(), output.stride()
        if of_query[2] != 1:
            query = query.contiguous()
            of_query = query.stride()
        if of_output[2] != 1:
            into = torch.empty_like(output, memory_format=torch.contiguous_format)
            self.run(layer, query, into, lse, keys, tensors, fresh, metadata, step)
            output.copy_(into)
            return
        scales = _NO_SCALES
        if self._takes_scales:
            scales = self._scales(layer, keys, tensors, query.device)
        kind = (of_query, of_output, keys.places, metadata.causal, scales.mode)
        call = (layer, query, output, lse, keys, tensors, scales, kind)
        side, prompts = metadata.side, None
        if side is None and metadata.prompts is None:
            self._run_blocks(*call, metadata.shape, step)
            return
        blocks = partial(self._run_blocks, *call)
        if metadata.prompts is not None:
            own = (layer.sinks, scales.k_tensor, scales.v_tensor)
            numbers = (self._scale, self._cap)
            prompts = self._prompts.prepared(
                query, output, lse, fresh, keys, tensors, own, numbers, scales[:3], metadata
            )
        if prompts is None and side is None:
            blocks(metadata.shape, step)
            return
        if prompts is None:
            prompts = partial(blocks, *metadata.prefill_alone(self.visibility, step))
        decodes = None
        if step.decode is not None:
            decodes = partial(blocks, *metadata.decode_alone(self.visibility, step))
        _launch_both(prompts, decodes, side)

    def _run_blocks(
        self,
        layer: AttentionLayer,
        query: Tensor,
        output: Tensor,
        lse: Tensor | None,
        keys: KeysValues,
        tensors: Callable[[], KeysValuesTensors],
        scales: _Scales,
        kind: _Kind,
        shape: Shape,
        step: Step,
    ) -> None:
        """Launch the kernels of a step whose rows are those of one kv head."""
        key = (shape, *kind)
        programs = self._programs.get(key)
        if programs is None:
            require_readable(keys.dtype, query.device)
            programs = self._programs[key] = self._make(key, keys.has_inline_scales, query.device)
        numbers = (
            _NO_LSE if lse is None else lse.stride(0),
            self._scale * scales.k,
            scales.v,
            self._cap,
        )
        own: _Own = _NOTHING
        if self._has_own or scales.mode:
            own = (layer.sinks, layer.alibi_slopes, scales.k_tensor, scales.v_tensor)
        handles = programs.handles.get(step.presence)
        if handles is not None and step.is_aligned and programs.is_current(query.device):
            call = (
                query.data_ptr(),
                keys.key,
                keys.value,
                output.data_ptr(),
                0 if lse is None else lse.data_ptr(),
            )
            places = _NOTHING if own is _NOTHING else _addresses(own)
            bits = call[0] | keys.bits | call[3] | call[4]
            if not (bits | (0 if own is _NOTHING else _union(places))) & _ALIGNMENT:
                _launch(handles, step, _ADDRESSES, call, places, numbers)
                return
        lse = _no_lse(query.device) if lse is None else lse
        arguments = (query, *tensors()[:2], output, lse)
        _launch(programs.launchers, step, _TENSORS, arguments, own, numbers)
        programs.remember(step, arguments, own, numbers)

    def _scales(
        self,
        layer: AttentionLayer,
        keys: KeysValues,
        tensors: Callable[[], KeysValuesTensors],
        device: torch.device,
    ) -> _Scales:
        if keys.has_inline_scales:
            return _Scales(0, 1.0, 1.0, *tensors()[2:])
        k, v = layer.k_scale, layer.v_scale
        if not isinstance(k, Tensor) and not isinstance(v, Tensor):
            return _Scales(0, float(k), float(v), None, None)
        k, v = (_as_tensor(scale, device) for scale in (k, v))
        heads = self._spec.num_kv_heads
        if k.numel() == v.numel() == 1:
            return _Scales(1, 1.0, 1.0, k, v)
        return _Scales(2, 1.0, 1.0, _spread(k, heads), _spread(v, heads))

    def _make(self, key: _Key, is_int8: bool, device: torch.device) -> _Programs:
        from attn_triton.kernels.combine import combine
        from attn_triton.kernels.decode import decode
        from attn_triton.kernels.prefill import prefill

        shape, _, output = key[:3]
        is_dependent = machine_of(device).has_dependent_launch
        heads = self._heads() | dict(zip(("O_TOKEN", "O_HEAD"), output[:2], strict=True))
        own = heads | self._constants(key, is_int8)
        merged = {name: heads[name] for name in heads if name not in ("D", "DP")}
        found: dict[str, Launcher] = {}
        if shape.decode is not None:
            blocks = {"BLOCKS": shape.blocks}
            found["decode"] = _launcher(decode, shape.decode, own | blocks, is_dependent)
            found["combine"] = Launcher(
                combine,
                merged | {"BV": merged["DVP"], "PARTS": COMBINE_PARTS},
                num_warps=combine_warps(self._padded[1]),
                is_dependent=is_dependent,
            )
        if shape.prefill is not None:
            tile = shape.prefill
            if self._spec.softcap is not None or self._spec.has_alibi or is_int8:
                tile = replace(tile, max_registers=None)  # their logits take more than that
            found["prefill"] = _launcher(prefill, tile, own)
        return _Programs(_Kernels(**found))

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
        _, query, _, places, causal, scales = key
        strides = places.strides
        names = ("K_BLOCK", "K_TOKEN", "K_HEAD", "V_BLOCK", "V_TOKEN", "V_HEAD")
        seen = self.visibility
        return {
            **dict(zip(names, (*strides[0], *strides[1]), strict=True)),
            **dict(zip(("Q_TOKEN", "Q_HEAD"), query[:2], strict=True)),
            "PAGE": places.page,
            "LEFT": seen.left,
            "RIGHT": seen.right,
            "CHUNK": seen.chunk,
            "CAUSAL": causal,
            "SOFTCAP": self._spec.softcap is not None,
            "SCALES": scales,
            "INT8": is_int8,
        }


class _Kernels(NamedTuple):
    """What runs each kernel: launchers, or compiled handles."""

    decode: Any = None
    combine: Any = None
    prefill: Any = None


class _Programs:
    """The kernels of one layer for calls of one kind.

    Attributes:
        launchers: compile, and look at each tensor.
        handles: by which pointers of the step are None: take addresses of aligned tensors.
    """

    __slots__ = ("_current_device", "handles", "launchers")

    def __init__(self, launchers: _Kernels) -> None:
        self.launchers = launchers
        self.handles: dict[tuple[bool, ...], _Kernels] = {}
        self._current_device: Callable[[], int] | None = None

    def is_current(self, device: torch.device) -> bool:
        """Whether handles may be launched: the current device is the tensors'."""
        return self._current_device is not None and self._current_device() == device.index

    def remember(
        self,
        step: Step,
        call: Sequence[Tensor | None],
        own: Sequence[Tensor | None],
        numbers: tuple[float, ...],
    ) -> None:
        """Keep the handles of a call whose tensors are all aligned; the interpreter has none."""
        launchers = [each for each in self.launchers if each is not None]
        if not launchers or launchers[0].is_interpreted or not step.is_aligned:
            return
        if any(each is not None and each.data_ptr() & _ALIGNMENT for each in (*call, *own)):
            return
        from attn_triton.kernels.compiling import driver_calls

        self._current_device = driver_calls()[1]
        found: dict[str, Handle | PendingHandle] = {}

        def finder(name: str, launcher: Launcher | None) -> Callable[..., None]:
            def find(grid: object, *args: object) -> None:
                if launcher is not None:
                    found[name] = launcher.handle(*args)

            return find

        finders = {name: finder(name, each) for name, each in self.launchers._asdict().items()}
        _launch(_Kernels(**finders), step, _TENSORS, call, own, numbers)
        self.handles[step.presence] = _Kernels(**found)


@functools.cache
def _no_lse(device: torch.device) -> Tensor:
    """Return what stands for an LSE that is not wanted, of no element."""
    return torch.empty(0, dtype=torch.float32, device=device)


def _addresses(tensors: Sequence[Tensor | None]) -> tuple[int | None, ...]:
    return tuple(None if each is None else each.data_ptr() for each in tensors)


def _union(addresses: Sequence[int | None]) -> int:
    """Return all bits that are set in any address."""
    bits = 0
    for address in addresses:
        if address is not None:
            bits |= address
    return bits


def _launch_both(
    prompts: Callable[[], None], decodes: Callable[[], None] | None, side: SideStream | None
) -> None:
    """Launch a step's prompts and its decodes: beside each other with a second stream."""
    if decodes is None:
        prompts()
        return
    if side is None:
        prompts()
        decodes()
        return
    with side:  # decodes first: prompts then take what they leave
        decodes()
    prompts()
    side.join()


def _launch(
    kernels: _Kernels,
    step: Step,
    kind: int,
    call: _Refs,
    own: _Refs,
    numbers: tuple[float, ...],
) -> None:
    """Launch a step's kernels.

    Args:
        kernels: what runs them.
        step: what they are handed.
        kind: whether `call` and `own` are tensors or addresses.
        call: query, keys, values, output, LSE.
        own: the layer's sinks, slopes and scales.
        numbers: stride of the LSE, factors on logits and values, cap.
    """
    decode, combine, prefill = step[:3]
    if decode is not None:
        kernels.decode(decode.grid, *call, *decode[kind], *own, *decode.numbers, *numbers)
    if combine is not None:
        kernels.combine(
            combine.grid, call[3], call[4], *combine[kind], own[0], *combine.numbers, numbers[0]
        )
    if prefill is not None:
        kernels.prefill(prefill.grid, *call, *prefill[kind], *own, *prefill.numbers, *numbers)


def _launcher(
    kernel: object, tile: Tile, constants: dict[str, object], is_dependent: bool | None = None
) -> Launcher:
    shape = {"ROWS": tile.rows, "BN": tile.keys, "STAGES": tile.stages}
    registers = {} if tile.max_registers is None else {"maxnreg": tile.max_registers}
    return Launcher(
        kernel,
        constants | shape,
        num_warps=tile.num_warps,
        options=registers,
        is_dependent=is_dependent,
    )


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
