"""The exact path: attention by matrix products in float32 or wider, with every feature.

It serves what scaled_dot_product_attention has no argument for: the LSE, sinks, soft-capped
logits, and ALiBi, whose bias as an additive mask would be rounded to the query's dtype.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attn_torch._spans import LOGITS_BYTES

__all__ = ["ExactOptions", "exact_attention"]

_PART_TERMS = 128  # terms of one part of a split sum, at least
_MAX_PARTS = 16


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExactOptions:
    """What a layer asks beside its tensors.

    Attributes:
        scale: factor on q.k, any finite number.
        softcap: logits become softcap * tanh(logits / softcap); None is off.
        alibi_slopes: (Hq,), or None.
        sinks: (Hq,) one extra logit per head with value zero, or None.
        accumulate: dtype of products, logits and sums, float32 or float64.
        splits_sums: sum products in parts; see `_product`.
    """

    scale: float
    softcap: float | None = None
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    accumulate: torch.dtype = torch.float32
    splits_sums: bool = False

    def of_heads(self, heads: slice) -> ExactOptions:
        """Return the options of some query heads."""
        slopes, sinks = self.alibi_slopes, self.sinks
        return replace(
            self,
            alibi_slopes=None if slopes is None else slopes[heads],
            sinks=None if sinks is None else sinks[heads],
        )


def exact_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: ExactOptions,
    *,
    mask: Tensor | None = None,
    distance: Tensor | None = None,
    max_bytes: int = LOGITS_BYTES,
) -> tuple[Tensor, Tensor]:
    """Attend, a few kv heads at a time where all logits would be too many.

    Args:
        query: (R, n, Hq, D).
        key: (R, L, Hkv, D), any strides.
        value: (R, L, Hkv, Dv), any strides.
        options: of the layer.
        mask: bool (R or 1, n, L), which keys each row sees; None: all.
        distance: (R or 1, n, L), |position of query - position of key|, where there are slopes.
        max_bytes: most bytes of logits; the caller chose n so that one kv head's fit.

    Returns:
        Output (R, n, Hkv, G, Dv) and LSE (R, Hkv, G, n), natural, both in `options.accumulate`.
        A row that sees no key has output 0, and LSE -inf or the sink's logit.
    """
    kv_heads = key.shape[2]
    grouped = query.unflatten(2, (kv_heads, query.shape[2] // kv_heads))
    parts = [
        _attend(
            grouped[:, :, heads],
            key[:, :, heads],
            value[:, :, heads],
            options.of_heads(slice(heads.start * grouped.shape[3], heads.stop * grouped.shape[3])),
            mask,
            distance,
        )
        for heads in _head_slices(grouped, key, options, max_bytes)
    ]
    if len(parts) == 1:
        return parts[0]
    outputs, lses = zip(*parts, strict=True)
    return torch.cat(outputs, dim=2), torch.cat(lses, dim=1)


def _head_slices(
    query: Tensor, key: Tensor, options: ExactOptions, max_bytes: int
) -> Iterator[slice]:
    requests, rows, kv_heads, groups, _ = query.shape
    per_head = requests * rows * groups * key.shape[1] * options.accumulate.itemsize
    step = min(kv_heads, max(1, max_bytes // per_head))
    for first in range(0, kv_heads, step):
        yield slice(first, min(first + step, kv_heads))


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: ExactOptions,
    mask: Tensor | None,
    distance: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Attend with query (R, n, H, G, D), key (R, L, H, D), value (R, L, H, Dv)."""
    wide = options.accumulate
    groups, rows = query.shape[3], query.shape[1]
    folded = query.permute(0, 2, 3, 1, 4).flatten(2, 3).to(wide)
    products = _product(folded, key.permute(0, 2, 3, 1).to(wide), options)
    logits = products.unflatten(2, (groups, rows))  # (R, H, G, n, L)
    _finish_logits(logits, options, mask, distance)
    total, lse = _softmax(logits, options)
    weighed = _product(products, value.transpose(1, 2).to(wide), options)
    output = weighed.unflatten(2, (groups, rows)).div_(total)
    if mask is not None:
        output.masked_fill_(total == 0, 0.0)
    return output.permute(0, 3, 1, 2, 4), lse


def _product(left: Tensor, right: Tensor, options: ExactOptions) -> Tensor:
    """Return left (R, H, X, K) @ right (R, H, K, Y).

    A GPU's float32 product adds the K terms one after the other, and its error grows with their
    number; the sum of products over parts of K has the error of a part.
    """
    length = left.shape[-1]
    step = max(_PART_TERMS, -(-length // _MAX_PARTS)) if options.splits_sums else length
    total = left[..., :step] @ right[:, :, :step]
    for first in range(step, length, step):
        part = slice(first, first + step)
        total += left[..., part] @ right[:, :, part]
    return total


def _finish_logits(
    logits: Tensor, options: ExactOptions, mask: Tensor | None, distance: Tensor | None
) -> None:
    """Turn products q.k (R, H, G, n, L) into logits in place: scale, softcap, ALiBi, mask."""
    logits.mul_(options.scale)
    if options.softcap is not None:
        # tanh saturates; forms built from exp overflow past |x / cap| of about 88.
        logits.div_(options.softcap).tanh_().mul_(options.softcap)
    if options.alibi_slopes is not None and distance is not None:
        slopes = _per_head(options.alibi_slopes, logits)
        logits.addcmul_(slopes, distance.to(logits)[:, None, None], value=-1)
    if mask is not None:
        logits.masked_fill_(~mask[:, None, None], -math.inf)


def _softmax(logits: Tensor, options: ExactOptions) -> tuple[Tensor, Tensor]:
    """Turn logits (R, H, G, n, L) into exp(logit - peak) in place.

    Returns their sums (R, H, G, n, 1), the sink's share included, and the LSE (R, H, G, n).
    """
    peak = logits.amax(-1, keepdim=True)
    sinks = None if options.sinks is None else _per_head(options.sinks, logits)
    if sinks is not None:
        peak = torch.maximum(peak, sinks)
    # A row without keys has a peak of -inf, which minus itself would be NaN.
    peak.masked_fill_(peak == -math.inf, 0.0)
    total = logits.sub_(peak).exp_().sum(-1, keepdim=True)
    if sinks is not None:
        total = total + (sinks - peak).exp_()
    return total, (peak + total.log()).squeeze(-1)


def _per_head(values: Tensor, logits: Tensor) -> Tensor:
    """Return (Hq,) as (1, H, G, 1, 1) of the logits' dtype."""
    return values.to(logits).view(1, *logits.shape[1:3], 1, 1)
