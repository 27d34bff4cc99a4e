"""AITER's decode over latents: by the recorded contract of its releases. Not run on hardware."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attn_rocm._aiter_mla_steps import TokenStep
from attn_rocm._vendor import aiter_mla
from attn_shared.errors import UnsupportedOptionError
from attn_shared.mla_heads import kernel_heads, padded_heads
from attn_shared.quantization import quantize_fp8
from attn_shared.signed_scale import Scale
from attn_shared.spec import LayerSpec

__all__ = ["KERNEL_HEADS", "AiterMLACall"]

KERNEL_HEADS = (16, 128)
"""Head counts that the kernels are built for."""


class AiterMLACall:
    """The call of one layer."""

    def __init__(self, spec: LayerSpec, kv_lora_rank: int) -> None:
        """Bind what a layer never changes; its scale may have any sign.

        Raises:
            ImportError: the library does not load, in its own words.
            UnsupportedOptionError: more heads than the kernels have.
        """
        self._function = aiter_mla.decode()
        takes = aiter_mla.arguments(self._function)
        self._scale = Scale(spec.scale)
        self._num_heads, self._rank = spec.num_heads, kv_lora_rank
        self._kernel_heads = kernel_heads(spec.num_heads, KERNEL_HEADS)
        self._fixed: dict[str, Any] = {"sm_scale": self._scale.value}
        if "page_size" in takes:
            self._fixed |= {"page_size": 1, "nhead_kv": 1}
        self.returns_lse = "return_lse" in takes

    def __call__(
        self,
        query: Tensor,
        kv_cache: Tensor,
        step: TokenStep,
        *,
        scales: tuple[Tensor, Tensor] | None = None,
        with_lse: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend, and return output (T, H, rank) and, if it is wanted, LSE (H, T).

        Args:
            query: (T, H, rank + rope), absorbed.
            kv_cache: (blocks, block_size, rank + rope), dense.
            step: the decodes.
            scales: of query and cache, each (1,) float32, of an fp8 cache alone.
            with_lse: the LSE is wanted; only where `returns_lse`.

        Raises:
            UnsupportedOptionError: blocks that lie apart, for the kernel counts tokens.
        """
        if not kv_cache.is_contiguous():
            raise UnsupportedOptionError(
                f"a cache of shape {tuple(kv_cache.shape)} with strides {kv_cache.stride()} is "
                "given; allowed: a dense one, for AITER finds tokens by their number.",
                hint="take no page_size_padded.",
            )
        own, more = query.dtype, self._fixed
        output_dtype = own
        query = padded_heads(self._scale.query(query), self._kernel_heads).contiguous()
        if scales is not None:
            query, output_dtype = quantize_fp8(query, scales[0], kv_cache.dtype), torch.bfloat16
            more = {**more, "q_scale": scales[0], "kv_scale": scales[1]}
        out = query.new_empty((*query.shape[:2], self._rank), dtype=output_dtype)
        _, lse = self._function(
            q=query,
            kv_buffer=kv_cache.view(-1, 1, 1, kv_cache.shape[-1]),
            o=out,
            qo_indptr=step.query_start_loc,
            kv_indptr=step.key_start_loc,
            kv_indices=step.slots,
            kv_last_page_lens=step.last_page_lens,
            max_seqlen_q=step.max_query_len,
            **({"return_lse": True} if with_lse else {}),
            **more,
        )
        heads = slice(0, self._num_heads)
        return out[:, heads].to(own), lse[:, heads].T if with_lse else None
