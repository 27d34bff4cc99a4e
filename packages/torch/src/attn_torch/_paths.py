"""Which of the two paths runs a layer's calls: torch's fused attention, or exact products."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_shared.spec import LayerSpec
from attn_torch._cache_reader import KeysValues
from attn_torch._exact import ExactOptions
from attn_torch._fused import is_fused
from attn_torch._plan import GroupTile, RequestTile
from attn_torch._precision import accumulator_dtype, fuses_ieee_float32
from attn_torch._runner import LayerCall
from attn_torch._visibility import Visibility

__all__ = ["CallMaker", "Read"]

Read = Callable[[RequestTile | GroupTile], KeysValues]
"""Returns the keys and values of a tile."""


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
        spec = self.spec
        device, is_float32 = query.device, spec.dtype is torch.float32
        fused = is_fused(device)
        is_exact = self.needs_exact or lse is not None
        is_exact = is_exact or (is_float32 and not fuses_ieee_float32(device))
        accumulate = torch.float32
        # Half-precision operands of a fused kernel never meet the process's float32 switches.
        if is_exact or is_float32 or not fused:
            accumulate = accumulator_dtype(device)
            is_exact = is_exact or accumulate is not torch.float32
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
                accumulate=accumulate,
                splits_sums=is_float32 and device.type != "cpu",
            ),
            is_exact=is_exact,
            is_fused=fused,
            is_invariant=spec.batch_invariant,
        )
