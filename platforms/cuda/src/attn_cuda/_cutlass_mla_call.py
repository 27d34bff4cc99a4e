"""CUTLASS's decode over latents, for Blackwell. Not run on hardware."""

from __future__ import annotations

import torch
from torch import Tensor

from attn_cuda._mla_step import LatentStep, in_pages
from attn_cuda._vendor import vllm_cutlass_mla
from attn_shared.mla_heads import padded_heads
from attn_shared.signed_scale import Scale
from attn_shared.spec import LayerSpec

__all__ = ["KERNEL_HEADS", "PAGE_SIZE", "CutlassMLACall", "workspace_bytes"]

PAGE_SIZE = 128
KERNEL_HEADS = 128

_SPLITS = -1  # chosen by the kernel


class CutlassMLACall:
    """The call of one layer: one query token each, of exactly 128 heads."""

    def __init__(self, spec: LayerSpec, kv_lora_rank: int) -> None:
        """Bind what a layer never changes.

        Args:
            spec: of the layer.
            kv_lora_rank: width of the latent.

        Raises:
            ImportError: the library does not load, in its own words.
        """
        self._function = vllm_cutlass_mla.interface().sm100_cutlass_mla_decode
        self._num_heads, self._rank = spec.num_heads, kv_lora_rank
        self._scale = Scale(spec.scale)

    def __call__(
        self,
        query: Tensor,
        kv_cache: Tensor,
        step: LatentStep,
        workspace: Tensor,
        *,
        with_lse: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend, and return output (T, H, rank) and, if it is wanted, LSE (H, T).

        Args:
            query: (T, H, rank + rope), absorbed, one row for each request.
            kv_cache: (blocks, block_size, rank + rope).
            step: with query_len 1.
            workspace: uint8, of `workspace_bytes`.
            with_lse: the LSE is wanted.
        """
        query = padded_heads(self._scale.query(query), KERNEL_HEADS)
        count = len(query)
        out = query.new_empty((count, KERNEL_HEADS, self._rank))
        lse = query.new_empty((count, KERNEL_HEADS) if with_lse else (0,), dtype=torch.float32)
        self._function(
            out=out,
            lse=lse,
            q_nope=query[..., : self._rank].contiguous(),
            q_pe=query[..., self._rank :].contiguous(),
            kv_c_and_k_pe_cache=in_pages(kv_cache, PAGE_SIZE),
            seq_lens=step.seq_lens,
            page_table=step.block_table,
            workspace=workspace,
            scale=self._scale.value,
            num_kv_splits=_SPLITS,
        )
        rows = slice(0, self._num_heads)
        return out[:, rows], lse[:, rows].T if with_lse else None


def workspace_bytes(max_seq_len: int, num_reqs: int, compute_units: int) -> int:
    """Return the bytes that the kernel needs for a step.

    Args:
        max_seq_len: host bound.
        num_reqs: B.
        compute_units: multiprocessors of the device.
    """
    size: int = vllm_cutlass_mla.interface().sm100_cutlass_mla_get_workspace_size(
        max_seq_len=max_seq_len,
        num_batches=num_reqs,
        sm_count=compute_units,
        num_kv_splits=_SPLITS,
    )
    return size
