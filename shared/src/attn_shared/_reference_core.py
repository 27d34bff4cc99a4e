"""One request of the reference: who sees whom, and softmax over what is seen.

The arithmetic is a parameter, so that the float64 specification and the eager attention whose
error bounds a backend's (`attn_shared.accuracy`) are the same few lines.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_shared.errors import InvalidInputError
from attn_shared.quantization import FP8_DTYPES, quantize_fp8

__all__ = [
    "EXACT",
    "Arithmetic",
    "AttentionOptions",
    "ReferenceResult",
    "attend",
    "bottom_right_positions",
    "check_heads",
    "largest_seen_value",
    "visible_keys",
]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionOptions:
    """What a layer asks of attention beside its tensors.

    Attributes:
        scale: multiplies q.k; any finite number, never derived from a head size.
        window: (left, right) keys visible beside the query's own, each >= 0, or None for
            unbounded. A causal row sees nothing to its right whatever `right` says.
        softcap: cap of `cap * tanh(x / cap)`; None is off.
        alibi_slopes: (Hq,) floating, or None.
        sinks: (Hq,) floating, one extra logit per head with value zero, or None.
        chunk_size: chunked local attention: a query sees keys of its own chunk of this many
            absolute positions, up to itself. None is off.

    Raises:
        InvalidInputError: a field has a value or shape that no kernel may accept.
    """

    scale: float
    window: tuple[int | None, int | None] = (None, None)
    softcap: float | None = None
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    chunk_size: int | None = None

    def __post_init__(self) -> None:
        """Refuse what the contract refuses."""
        if not math.isfinite(self.scale):
            raise InvalidInputError.for_argument("scale", self.scale, "a finite number")
        _check_window(self.window)
        if self.softcap is not None and not (math.isfinite(self.softcap) and self.softcap > 0):
            raise InvalidInputError.for_argument(
                "softcap", self.softcap, "a positive finite number, or None for off"
            )
        if self.chunk_size is not None and self.chunk_size < 1:
            raise InvalidInputError.for_argument(
                "chunk_size", self.chunk_size, ">= 1, or None for off"
            )
        _check_per_head("alibi_slopes", self.alibi_slopes)
        _check_per_head("sinks", self.sinks)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReferenceResult:
    """Output and LSE of one call.

    Attributes:
        output: (T, Hq, Dv), float64 from the reference, the compute dtype from eager attention.
        lse: (Hq, T), natural log of the denominator, the sink included; float64 or float32.
        num_tokens: leading rows that belong to requests. Later rows hold NaN, so that a
            comparison over them cannot pass unnoticed.
        value_abs_max: largest magnitude among the values that some row sees; 0.0 if none.
    """

    output: Tensor
    lse: Tensor
    num_tokens: int
    value_abs_max: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """Which dtype each step rounds to.

    Attributes:
        operand: query, key and value are rounded to it before use.
        accumulate: dtype of logits, softmax and sums.
        probability: the weights are rounded to it before they meet the values.
        output: dtype of the returned output.
        by_device: logits are the device's own products of `operand`, where it has products of 16
            bits whose sums are float32; else exact ones.
    """

    operand: torch.dtype
    accumulate: torch.dtype
    probability: torch.dtype
    output: torch.dtype
    by_device: bool = False


EXACT = Arithmetic(
    operand=torch.float64,
    accumulate=torch.float64,
    probability=torch.float64,
    output=torch.float64,
)
"""float64 throughout: the specification."""


def bottom_right_positions(query_len: int, key_len: int, device: torch.device) -> Tensor:
    """Return absolute positions int64 (Tq,): row r sits at key_len - query_len + r."""
    return torch.arange(key_len - query_len, key_len, device=device)


def visible_keys(
    query_positions: Tensor,
    key_len: int,
    options: AttentionOptions,
    *,
    causal: bool,
    mm_prefix_ranges: Sequence[tuple[int, int]] = (),
) -> Tensor:
    """Return bool (Tq, Tk): which of the keys at positions 0..key_len-1 each query sees.

    Causality, window and chunk narrow; multimodal ranges then widen: two positions of one range
    see each other whatever the former say.

    Raises:
        InvalidInputError: chunked local attention without causality, or a range that is not
            0 <= start <= end.
    """
    query = query_positions.unsqueeze(1)
    key = torch.arange(key_len, device=query_positions.device).unsqueeze(0)
    left, right = options.window
    visible = torch.ones(len(query), key_len, dtype=torch.bool, device=key.device)
    if causal:
        visible &= key <= query
    if left is not None:
        visible &= key >= query - left
    if right is not None:
        visible &= key <= query + right
    if options.chunk_size is not None:
        if not causal:
            raise InvalidInputError.for_argument(
                "causal", causal, "True with chunk_size: a chunk is seen up to the query itself"
            )
        visible &= key // options.chunk_size == query // options.chunk_size
    for start, end in mm_prefix_ranges:
        if not 0 <= start <= end:
            raise InvalidInputError.for_argument(
                "mm_prefix_ranges", (start, end), "(start, end), both inclusive, 0 <= start <= end"
            )
        visible |= ((query >= start) & (query <= end)) & ((key >= start) & (key <= end))
    return visible


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: AttentionOptions,
    *,
    visible: Tensor,
    query_positions: Tensor,
    arithmetic: Arithmetic = EXACT,
) -> tuple[Tensor, Tensor]:
    """Attend within one request.

    Args:
        query: (Tq, Hq, D).
        key: (Tk, Hkv, D), at absolute positions 0..Tk-1.
        value: (Tk, Hkv, Dv).
        options: of the layer.
        visible: bool (Tq, Tk).
        query_positions: int64 (Tq,).
        arithmetic: what each step rounds to.

    Returns:
        Output (Tq, Hq, Dv) and LSE (Hq, Tq).
    """
    seen = visible.any(0)
    key_positions = seen.nonzero().squeeze(1)
    key, value, visible = key[seen], value[seen], visible[:, seen]
    distance = (query_positions.unsqueeze(1) - key_positions.unsqueeze(0)).abs()
    operands = [_round(x, arithmetic.operand, arithmetic) for x in (query, key, value)]
    groups = query.shape[1] // key.shape[1]
    outputs, lses = [], []
    for kv_head in range(key.shape[1]):
        heads = slice(kv_head * groups, (kv_head + 1) * groups)
        q, k, v = operands[0][:, heads].transpose(0, 1), operands[1][:, kv_head], operands[2]
        logits = _logits(_products(q, k, arithmetic), options, heads, distance)
        weights, total, lse = _softmax(logits, options, heads, visible)
        outputs.append(_weigh(weights, total, v[:, kv_head], visible, arithmetic))
        lses.append(lse)
    return torch.cat(outputs).transpose(0, 1).to(arithmetic.output), torch.cat(lses)


_TILE_ROWS = 64
_HALVES = (torch.float16, torch.bfloat16)


def _products(query: Tensor, key: Tensor, arithmetic: Arithmetic) -> Tensor:
    """Return query (G, Tq, D) . key (Tk, D) as (G, Tq, Tk).

    Tensor cores cut off what a sum in float32 cannot hold after each few terms, so that their
    logits lie below the exact ones, by more the wider a head is. Rows are filled up to a tile:
    for a few of them libraries have kernels that add otherwise.
    """
    is_half = arithmetic.operand in _HALVES and arithmetic.accumulate is torch.float32
    has_products = query.device.type == "cuda" and torch.version.hip is None
    if not (arithmetic.by_device and is_half and has_products and len(key)):
        return query @ key.T
    rows = query.to(arithmetic.operand).flatten(0, 1)
    count = len(rows)
    rows = torch.nn.functional.pad(rows, (0, 0, 0, -count % _TILE_ROWS))
    products = torch.mm(rows, key.to(arithmetic.operand).T, out_dtype=torch.float32)
    return products[:count].view(*query.shape[:2], len(key))


def largest_seen_value(value: Tensor, visible: Tensor) -> float:
    """Return max |V| over the keys of value (Tk, Hkv, Dv) that some row of visible sees."""
    seen = value[visible.any(0)]
    return float(seen.abs().amax()) if seen.numel() else 0.0


def check_heads(query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> None:
    """Check that (.., Hq, D), (.., Hkv, D), (.., Hkv, Dv) and the per-head options fit.

    Raises:
        InvalidInputError: they do not.
    """
    heads, kv_heads = query.shape[-2], key.shape[-2]
    if key.shape[-1] != query.shape[-1]:
        raise InvalidInputError.for_argument(
            "key head size", key.shape[-1], f"{query.shape[-1]}, that of query"
        )
    if value.shape[:-1] != key.shape[:-1]:
        raise InvalidInputError.for_argument(
            "value.shape", tuple(value.shape), f"{tuple(key.shape[:-1])} + (head_size_v,), as key"
        )
    if kv_heads == 0 or heads % kv_heads:
        raise InvalidInputError.for_argument(
            "num_heads", heads, f"a multiple of num_kv_heads ({kv_heads})"
        )
    for name, tensor in (("alibi_slopes", options.alibi_slopes), ("sinks", options.sinks)):
        if tensor is not None and len(tensor) != heads:
            raise InvalidInputError.for_argument(
                f"{name}.shape", tuple(tensor.shape), f"({heads},), one per query head"
            )


def _logits(products: Tensor, options: AttentionOptions, heads: slice, distance: Tensor) -> Tensor:
    """Turn products (G, Tq, Tk) into logits: scale, then softcap, then ALiBi."""
    logits = products * options.scale
    if options.softcap is not None:
        # torch.tanh saturates; forms built from exp overflow past |x / cap| of about 88.
        logits = options.softcap * torch.tanh(logits / options.softcap)
    if options.alibi_slopes is not None:
        slopes = options.alibi_slopes[heads].to(logits).reshape(-1, 1, 1)
        logits = logits - slopes * distance.to(logits)
    return logits


def _softmax(
    logits: Tensor, options: AttentionOptions, heads: slice, visible: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return weights exp(x - peak) (G, Tq, Tk), their sum with the sink (G, Tq, 1), LSE (G, Tq).

    A call without sinks has sinks of -inf, which weigh nothing; that column also gives a row
    without any key something to take the maximum of.
    """
    logits = torch.where(visible, logits, -math.inf)
    sink = logits.new_full((logits.shape[0], 1, 1), -math.inf)
    if options.sinks is not None:
        sink = options.sinks[heads].to(logits).reshape(-1, 1, 1)
    logits = torch.cat([logits, sink.expand(-1, logits.shape[1], 1)], dim=-1)
    peak = logits.amax(-1, keepdim=True)
    peak = torch.where(peak == -math.inf, 0.0, peak)
    weights = (logits - peak).exp()
    total = weights.sum(-1, keepdim=True)
    return weights[..., :-1], total, (peak + total.log()).squeeze(-1)


def _weigh(
    weights: Tensor, total: Tensor, value: Tensor, visible: Tensor, arithmetic: Arithmetic
) -> Tensor:
    """Return the weighted mean (G, Tq, Dv) of value (Tk, Dv); 0 where nothing weighs."""
    if arithmetic.probability in FP8_DTYPES:
        # fp8 cannot hold 1/n of a long row, so its kernels round before the division.
        sums = _select_sum(_round(weights, arithmetic.probability, arithmetic), value, visible)
        return torch.where(total == 0, 0.0, sums / total)
    mean = torch.where(total == 0, 0.0, weights / total)
    return _select_sum(_round(mean, arithmetic.probability, arithmetic), value, visible)


def _select_sum(weights: Tensor, value: Tensor, visible: Tensor) -> Tensor:
    """Return weights (G, Tq, Tk) @ value (Tk, Dv) in which an invisible value takes no part.

    Its weight is 0, and 0 * NaN is NaN: rows of value that are not finite are therefore added one
    by one, and only where they are visible.
    """
    finite = value.isfinite().all(-1)
    total = weights @ torch.where(finite.unsqueeze(-1), value, 0.0)
    for index in (~finite).nonzero().flatten().tolist():
        term = weights[..., index, None] * value[index]
        total = total + torch.where(visible[:, index, None], term, 0.0)
    return total


def _round(x: Tensor, dtype: torch.dtype, arithmetic: Arithmetic) -> Tensor:
    """Return x rounded to `dtype` and held in the accumulator's dtype."""
    rounded = quantize_fp8(x, 1.0, dtype) if dtype in FP8_DTYPES else x.to(dtype)
    return rounded.to(arithmetic.accumulate)


def _check_window(window: tuple[int | None, int | None]) -> None:
    left, right = window
    if (left is not None and left < 0) or (right is not None and right < 0):
        raise InvalidInputError.for_argument(
            "window",
            window,
            "(left, right), each >= 0 or None for unbounded",
            hint="a window of W keys that includes the query's own is (W - 1, 0) for causal rows.",
        )


def _check_per_head(name: str, tensor: Tensor | None) -> None:
    if tensor is not None and (tensor.dim() != 1 or not tensor.is_floating_point()):
        raise InvalidInputError.for_argument(
            name, f"{tensor.dtype} {tuple(tensor.shape)}", "a floating tensor (Hq,), or None"
        )
