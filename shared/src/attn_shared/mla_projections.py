"""The up-projection of latents, by which absorbed and expanded attention are one computation.

With c a latent, head h's key is W_UK[h] c and its value W_UV[h] c (DeepSeek-V2, arXiv 2405.04434,
section 2.1). Hence q . (W_UK c) = (W_UK^T q) . c and sum p W_UV c = W_UV sum p c: a query taken
through W_UK^T attends to latents themselves, and the result is taken through W_UV.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from attn_shared.errors import InvalidInputError
from attn_shared.request import MLADims

__all__ = ["MLAProjections"]


class MLAProjections:
    """Views of one weight: nothing is copied.

    Products are torch's, under the process's float32 precision switches, as a model's own are. A
    product's rounding may depend on its number of rows: where results must not depend on what
    shares the batch, each request's rows are given by `starts` and multiplied by themselves.

    Attributes:
        kv_b_proj: (H * (qk_nope_head_dim + v_head_dim), kv_lora_rank), of a torch `Linear`.
        w_uk: (H, qk_nope_head_dim, kv_lora_rank).
        w_uv: (H, v_head_dim, kv_lora_rank).
    """

    def __init__(self, kv_b_proj: Tensor, dims: MLADims, num_heads: int) -> None:
        """Look at the weight by heads.

        Args:
            kv_b_proj: of this rank's heads; head by head, first the key's rows, then the value's.
            dims: widths.
            num_heads: H.

        Raises:
            InvalidInputError: the weight has another shape.
        """
        rows = dims.qk_nope_head_dim + dims.v_head_dim
        shape = (num_heads * rows, dims.kv_lora_rank)
        if not isinstance(kv_b_proj, Tensor) or kv_b_proj.shape != shape:
            found = tuple(kv_b_proj.shape) if isinstance(kv_b_proj, Tensor) else repr(kv_b_proj)
            raise InvalidInputError.for_argument(
                "kv_b_proj shape",
                found,
                f"{shape}: {num_heads} heads of qk_nope_head_dim={dims.qk_nope_head_dim} + "
                f"v_head_dim={dims.v_head_dim} rows, over kv_lora_rank={dims.kv_lora_rank}",
                hint="give the rows of this rank's heads.",
            )
        self.dims = dims
        self.kv_b_proj = kv_b_proj.detach()
        by_head = self.kv_b_proj.unflatten(0, (num_heads, rows))
        self.w_uk = by_head[:, : dims.qk_nope_head_dim]
        self.w_uv = by_head[:, dims.qk_nope_head_dim :]

    def absorb(self, query: Tensor, starts: Sequence[int] | None = None) -> Tensor:
        """Return the query (T, H, kv_lora_rank + rope) that attends to latents.

        Args:
            query: (T, H, nope + rope).
            starts: (B + 1,) bounds of rows to multiply by themselves; None: all at once.
        """
        nope, rank = self.dims.qk_nope_head_dim, self.dims.kv_lora_rank
        absorbed = query.new_empty(*query.shape[:2], self.dims.latent_size)
        for rows in _slices(starts, len(query)):
            own = _by_head(query[rows, :, :nope], is_alone=starts is not None)
            absorbed[rows, :, :rank] = torch.bmm(own, self.w_uk).transpose(0, 1)
        absorbed[..., rank:] = query[..., nope:]
        return absorbed

    def project(self, latents: Tensor, output: Tensor, starts: Sequence[int] | None = None) -> None:
        """Write the values of attended latents.

        Args:
            latents: (T, H, kv_lora_rank).
            output: (T, H, v_head_dim), written in place.
            starts: as in `absorb`.
        """
        for rows in _slices(starts, len(latents)):
            own = _by_head(latents[rows], is_alone=starts is not None)
            output[rows].copy_(torch.bmm(own, self.w_uv.transpose(1, 2)).transpose(0, 1))


def _slices(starts: Sequence[int] | None, num_rows: int) -> Iterator[slice]:
    bounds = (0, num_rows) if starts is None else starts
    for start, stop in pairwise(bounds):
        yield slice(start, stop)


def _by_head(rows: Tensor, *, is_alone: bool) -> Tensor:
    """Return rows (n, H, D) as (H, n, D), copied where their place must not decide a kernel."""
    moved = rows.transpose(0, 1)
    return moved.contiguous().clone() if is_alone else moved
