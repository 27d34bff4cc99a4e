"""AITER's decode over latents: by the recorded contract of its releases. Not run on hardware."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_rocm._vendor import aiter_mla
from attn_shared.mla_heads import kernel_heads, padded_heads
from attn_shared.quantization import quantize_fp8
from attn_shared.spec import LayerSpec

__all__ = ["KERNEL_HEADS", "AiterMLACall", "TokenStep", "token_slots"]

KERNEL_HEADS = (16, 128)
"""Head counts that the kernels are built for."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenStep:
    """Decodes of a step, with the slot of every key: the kernel's pages are single tokens.

    Attributes:
        query_start_loc: (B + 1,) int32.
        max_query_len: host bound.
        key_start_loc: (B + 1,) int32, prefix sums of the lengths.
        slots: (n,) int32, those of all requests in a row; what follows key_start_loc[-1] is unread.
        last_page_lens: (B,) int32, all 1.
    """

    query_start_loc: Tensor
    max_query_len: int
    key_start_loc: Tensor
    slots: Tensor
    last_page_lens: Tensor


def token_slots(
    block_table: Tensor, key_start_loc: Tensor, num_slots: int, block_size: int
) -> Tensor:
    """Return the slot of each key, request after request: (num_slots,) int32.

    Args:
        block_table: (B, M) int32.
        key_start_loc: (B + 1,) int32, on the same device; nothing waits for it.
        num_slots: at least key_start_loc[-1]; slots past that are any valid ones.
        block_size: tokens per block.
    """
    places = torch.arange(num_slots, dtype=torch.int32, device=block_table.device)
    owner = torch.searchsorted(key_start_loc[1:], places, right=True)
    owner.clamp_(max=len(block_table) - 1)
    position = places - key_start_loc[owner]
    column = (position // block_size).clamp_(max=block_table.shape[1] - 1)
    return block_table[owner, column] * block_size + position % block_size


class AiterMLACall:
    """The call of one layer."""

    def __init__(self, spec: LayerSpec, kv_lora_rank: int) -> None:
        """Bind what a layer never changes.

        Raises:
            ImportError: the library does not load, in its own words.
            UnsupportedOptionError: more heads than the kernels have.
        """
        self._function = aiter_mla.decode()
        takes = aiter_mla.arguments(self._function)
        self._num_heads, self._rank = spec.num_heads, kv_lora_rank
        self._kernel_heads = kernel_heads(spec.num_heads, KERNEL_HEADS)
        self._fixed: dict[str, Any] = {"sm_scale": spec.scale}
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
        """
        output_dtype, more = query.dtype, self._fixed
        query = padded_heads(query, self._kernel_heads).contiguous()
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
        return out[:, heads], lse[:, heads].T if with_lse else None
