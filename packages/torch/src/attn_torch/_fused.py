"""The fast path: torch's scaled_dot_product_attention, with grouped heads and no copies of keys.

A kv head's G query heads become rows of one query, so that its keys are read once and no mask is
needed where every row sees every key: the shape of decoding. With many masked rows the mask would
have to be repeated for each head; there kv heads become the batch and keys are broadcast over G.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

__all__ = ["fused_attention", "is_fused"]

_FOLDED_ROWS = 64
"""Most rows whose mask is repeated for each head of a group."""


def is_fused(device: torch.device) -> bool:
    """Whether torch surely runs a kernel that never holds all logits.

    Elsewhere it may fall back to products of whole matrices, which is right, but whose logits the
    caller must bound.
    """
    return device.type in ("cpu", "cuda")


def fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    mask: Tensor | None = None,
    is_square_causal: bool = False,
) -> Tensor:
    """Attend.

    Args:
        query: (R, n, Hq, D).
        key: (R, L, Hkv, D), any strides.
        value: (R, L, Hkv, Dv), any strides.
        scale: of the logits, positive.
        mask: bool (R or 1, n, L), which keys each row sees, at least one each; None: all.
        is_square_causal: n equals L, and row r sees keys 0 to r.

    Returns:
        (R, n, Hkv, G, Dv), G = Hq / Hkv, any strides.
    """
    requests, rows, heads, width = query.shape
    kv_heads, width_v = value.shape[2:]
    groups = heads // kv_heads
    if width != width_v and query.device.type == "cpu":
        # The CPU's fused kernel takes one width; zeros change neither q.k nor the first Dv columns.
        query, key, value = _of_one_width(query, key, value)
    grouped = query.view(requests, rows, kv_heads, groups, query.shape[-1])
    key, value = key.transpose(1, 2), value.transpose(1, 2)
    if is_square_causal:
        output = _broadcast(grouped, key, value, scale=scale, mask=None, is_causal=True)
    elif mask is None or groups == 1 or rows <= _FOLDED_ROWS:
        output = _folded(grouped, key, value, scale=scale, mask=mask)
    else:
        output = _broadcast(grouped, key, value, scale=scale, mask=mask, is_causal=False)
    return output[..., :width_v]


def _of_one_width(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tensors with zeros behind the narrower heads."""
    missing = query.shape[-1] - value.shape[-1]
    if missing > 0:
        return query, key, pad(value, (0, missing))
    return pad(query, (0, -missing)), pad(key, (0, -missing)), value


def _folded(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float, mask: Tensor | None
) -> Tensor:
    """Attend with query (R, n, Hkv, G, D) as (R, Hkv, G * n, D)."""
    requests, rows, kv_heads, groups, width = query.shape
    folded = query.permute(0, 2, 3, 1, 4).reshape(requests, kv_heads, groups * rows, width)
    if mask is not None:
        mask = mask.unsqueeze(1)
        if rows > 1 and groups > 1:
            mask = mask.repeat(1, 1, groups, 1)
    output = scaled_dot_product_attention(folded, key, value, mask, scale=scale)
    grouped = output.view(requests, kv_heads, groups, rows, output.shape[-1])
    return grouped.permute(0, 3, 1, 2, 4)


def _broadcast(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    mask: Tensor | None,
    is_causal: bool,
) -> Tensor:
    """Attend with query (R, n, Hkv, G, D) as (R * Hkv, G, n, D), one batch entry per kv head."""
    requests, rows, kv_heads, groups, _ = query.shape
    batched = query.permute(0, 2, 3, 1, 4).flatten(0, 1)
    keys, values = (
        side.flatten(0, 1).unsqueeze(1).expand(-1, groups, -1, -1) for side in (key, value)
    )
    if mask is not None:
        mask = mask.unsqueeze(1)
        if mask.shape[0] > 1:
            mask = mask.repeat_interleave(kv_heads, dim=0)
    output = scaled_dot_product_attention(
        batched, keys, values, mask, is_causal=is_causal, scale=scale
    )
    grouped = output.view(requests, kv_heads, groups, rows, output.shape[-1])
    return grouped.permute(0, 3, 1, 2, 4)
