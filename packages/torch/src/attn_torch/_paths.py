"""Which of the two paths runs a layer's calls: torch's fused attention, or exact products."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_shared.device import DeviceFacts
from attn_shared.dtypes import dtype_name
from attn_shared.kernel_paths import KernelPath
from attn_shared.request import AttentionRequest
from attn_shared.spec import LayerSpec
from attn_torch._cache_reader import KeysValues
from attn_torch._exact import ExactOptions
from attn_torch._fused import is_fused
from attn_torch._plan import GroupTile, RequestTile
from attn_torch._precision import accumulator_dtype, fuses_ieee_float32
from attn_torch._runner import LayerCall
from attn_torch._visibility import Visibility

__all__ = ["CallMaker", "Read", "Way", "kernel_paths_of", "way_of"]

Read = Callable[[RequestTile | GroupTile], KeysValues]
"""Returns the keys and values of a tile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How calls of one kind run.

    Attributes:
        is_exact: by exact products.
        accumulate: what those multiply in.
    """

    is_exact: bool
    accumulate: torch.dtype


def way_of(device: torch.device, dtype: torch.dtype, *, needs_exact: bool) -> Way:
    """Return how calls run.

    Args:
        device: where they run.
        dtype: of the layer.
        needs_exact: they ask for what the fused path has no argument for.
    """
    is_float32 = dtype is torch.float32
    is_exact = needs_exact or (is_float32 and not fuses_ieee_float32(device))
    accumulate = torch.float32
    # Half-precision operands of a fused kernel never meet the process's float32 switches.
    if is_exact or is_float32 or not is_fused(device):
        accumulate = accumulator_dtype(device)
        is_exact = is_exact or accumulate is not torch.float32
    return Way(is_exact=is_exact, accumulate=accumulate)


def kernel_paths_of(
    request: AttentionRequest, device: DeviceFacts, rows: str
) -> tuple[KernelPath, ...]:
    """Return on which of the two paths a request's calls run, with and without an LSE.

    A layer's scale is taken for positive.

    Args:
        request: one over latents, or without what the fused path has no argument for.
        device: where it would run.
        rows: what the rows of the calls are.
    """
    there = torch.device(device.torch_device_type)
    kinds = (True,) if request.needs_lse or request.dcp_size > 1 else (False, True)
    found = {asks: way_of(there, request.dtype, needs_exact=asks) for asks in kinds}
    if len({way.is_exact for way in found.values()}) == 1:
        why = _because(next(iter(found.values())), request, asks_lse=kinds == (True,))
        return (KernelPath(rows=rows, kernel=_words(found[kinds[0]]), why=why),)
    return tuple(
        KernelPath(
            rows=f"{rows} with an LSE" if asks else f"{rows} without an LSE",
            kernel=_words(way),
            why=_because(way, request, asks_lse=asks),
        )
        for asks, way in found.items()
    )


def _words(way: Way) -> str:
    if not way.is_exact:
        return "scaled_dot_product_attention"
    return f"matrix products in {dtype_name(way.accumulate)}"


def _because(way: Way, request: AttentionRequest, *, asks_lse: bool) -> str:
    if not way.is_exact:
        return "torch's fused kernels, which return no LSE"
    if asks_lse:
        return "torch's fused kernels return no LSE"
    return f"torch's fused kernels round products of {dtype_name(request.dtype)} here"


@dataclass(frozen=True, slots=True, kw_only=True)
class CallMaker:
    """Makes the calls of one layer.

    Attributes:
        spec: of the layer.
        visibility: what its rows see.
        num_kv_heads: heads of the keys that are read.
        needs_exact: the layer asks for what the fused path has no argument for.
    """

    spec: LayerSpec
    visibility: Visibility
    num_kv_heads: int
    needs_exact: bool

    def make(
        self,
        query: Tensor,
        output: Tensor,
        lse: Tensor | None,
        read: Read,
        *,
        alibi_slopes: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> LayerCall:
        """Choose the path for one call.

        Args:
            query: (T, Hq, D).
            output: (T, Hq, Dv), written in place.
            lse: (Hq, T) float32, written in place, or None.
            read: where keys and values come from.
            alibi_slopes: (Hq,), or None.
            sinks: (Hq,), or None.
        """
        spec, device = self.spec, query.device
        is_exact = self.needs_exact or lse is not None
        way = way_of(device, spec.dtype, needs_exact=is_exact)
        return LayerCall(
            query=query,
            output=output,
            lse=lse,
            read=read,
            num_kv_heads=self.num_kv_heads,
            visibility=self.visibility,
            options=ExactOptions(
                scale=spec.scale,
                softcap=spec.softcap,
                alibi_slopes=alibi_slopes,
                sinks=sinks,
                accumulate=way.accumulate,
                splits_sums=spec.dtype is torch.float32 and device.type != "cpu",
            ),
            is_exact=way.is_exact,
            is_fused=is_fused(device),
            is_invariant=spec.batch_invariant,
        )
