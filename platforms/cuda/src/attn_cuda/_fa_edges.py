"""What FlashAttention's kernels say otherwise than the contract, put right beside the call."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attn_cuda._fa_providers import Provider
from attn_shared.quantization import quantize_fp8
from attn_shared.rounded_sinks import RoundedSinks

__all__ = ["Descales", "Sinks", "without_positive_infinity"]

_E4M3_MAX = 448.0
_MOST_FACTORS = 256


def without_positive_infinity(lse: Tensor) -> Tensor:
    """Return an LSE in which a row without keys is -inf; FlashAttention 2 writes +inf."""
    return lse.masked_fill_(lse == math.inf, -math.inf)


class Sinks(RoundedSinks):
    """The sinks of a layer; FlashAttention 3 takes bfloat16."""

    def __init__(self, provider: Provider) -> None:
        super().__init__(torch.bfloat16 if provider.version == 3 else None)


class Descales:
    """Factors of an fp8 query and cache as FlashAttention 3 reads them: (B, Hkv) float32.

    What is made once is kept, but not while a graph is captured: its contents would be set when the
    graph is replayed, and not before.
    """

    def __init__(self, num_kv_heads: int, queries_per_kv: int) -> None:
        self._num_kv_heads = num_kv_heads
        self._queries_per_kv = queries_per_kv
        # (a number or minus a tensor's id, requests, device) -> factors, and the tensor, whose id
        # stays its own so.
        self._factors: dict[tuple[float, int, torch.device], tuple[Tensor, float | Tensor]] = {}

    def of(self, scale: float | Tensor, num_reqs: int, device: torch.device) -> Tensor:
        """Return one scale as a view without a copy: a number, a tensor of one, or (Hkv,)."""
        key = (-id(scale) if isinstance(scale, Tensor) else scale, num_reqs, device)
        known = self._factors.get(key)
        if known is not None:
            return known[0]
        values = scale if isinstance(scale, Tensor) else torch.full((1,), scale, device=device)
        factors = values.reshape(1, -1).expand(num_reqs, self._num_kv_heads)
        if _may_keep(device):
            if len(self._factors) >= _MOST_FACTORS:
                self._factors.clear()
            self._factors[key] = (factors, scale)
        return factors

    def quantized(self, query: Tensor, scale: float | Tensor) -> Tensor:
        """Return the query (T, Hq, D) as float8_e4m3fn: value / scale, saturating."""
        if not isinstance(scale, Tensor) and scale == 1.0:
            # One launch that clamps by tensors and casts as it stores took 14 us of an H200 for 32
            # rows, for which these two take one or two each.
            rows = query.detach() if query.requires_grad else query
            return rows.clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn)
        if isinstance(scale, Tensor) and scale.numel() > 1:
            scale = scale.repeat_interleave(self._queries_per_kv)
        return quantize_fp8(query, scale, torch.float8_e4m3fn)


def _may_keep(device: torch.device) -> bool:
    return device.type != "cuda" or not torch.cuda.is_current_stream_capturing()
