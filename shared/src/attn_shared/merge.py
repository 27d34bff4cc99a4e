"""Combine partial attention results over disjoint keys by their natural-log LSE.

With shares p_i = exp(lse_i - lse), the merged output is sum(p_i * output_i) and the merged LSE is
log(sum(exp(lse_i))): the identity by which softmax over a union follows from softmax over its
parts (FlashAttention, arXiv 2205.14135). A side without keys has LSE -inf and weighs nothing.

The functions branch on no tensor value unless `checked`, so that they can be captured in a graph.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from attn_shared._overlap import is_self_overlapping, overlaps
from attn_shared.argument_checks import require_floats, require_list, require_tensor
from attn_shared.errors import InvalidInputError

__all__ = ["check_merge", "merge_attn_states", "merge_into", "merge_many", "to_natural"]

_LSE_DTYPES = (torch.float32, torch.float64)
_OUTPUT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def merge_attn_states(
    output_a: Tensor,
    lse_a: Tensor,
    output_b: Tensor,
    lse_b: Tensor,
    *,
    output: Tensor | None = None,
    output_lse: Tensor | None = None,
    checked: bool = False,
) -> tuple[Tensor, Tensor]:
    """Merge two partial results; `merge_many` for two.

    Args:
        output_a: (T, H, D), any strides.
        lse_a: (H, T), natural log, any strides.
        output_b: (T, H, D), of output_a's dtype.
        lse_b: (H, T), of lse_a's dtype.
        output: (T, H, D) to write to, of the same dtype, or None.
        output_lse: (H, T) to write to, of the same dtype, or None.
        checked: also look at the contents.

    Returns:
        Output (T, H, D) and LSE (H, T).

    Raises:
        InvalidInputError: as `merge_many`.
    """
    return merge_many(
        (output_a, output_b),
        (lse_a, lse_b),
        output=output,
        output_lse=output_lse,
        checked=checked,
    )


def merge_into(total: Tensor, total_lse: Tensor, found: Tensor, found_lse: Tensor) -> None:
    """Merge a partial result into another, in place.

    Args:
        total: (T, H, D), any strides, written.
        total_lse: (H, T), natural log, any strides, written.
        found: (T, H, D) of any floating dtype; it is merged in total's.
        found_lse: (H, T), of total_lse's dtype.

    Raises:
        InvalidInputError: as `merge_many`.
    """
    merged, lse = merge_attn_states(total, total_lse, found.to(total.dtype), found_lse)
    total.copy_(merged)
    total_lse.copy_(lse)


def merge_many(
    outputs: Sequence[Tensor],
    lses: Sequence[Tensor],
    *,
    output: Tensor | None = None,
    output_lse: Tensor | None = None,
    checked: bool = False,
) -> tuple[Tensor, Tensor]:
    """Merge the partial results of any number of shards at once.

    A shard whose LSE is -inf takes no part, whatever its output holds; the only shard that is not
    empty is returned bit for bit; where all are empty the output is 0 and the LSE -inf. +inf,
    which some kernels write for a row without keys, counts as empty. NaN in any LSE gives NaN.

    Args:
        outputs: each (T, H, D), of one floating dtype, any strides.
        lses: each (H, T), natural log, float32 or float64, any strides.
        output: (T, H, D) to write to, of the shards' dtype, or None for a new tensor.
        output_lse: (H, T) to write to, of the LSEs' dtype, or None for a new tensor.
        checked: refuse an LSE of +inf. Looks at contents, so not while a graph is captured.

    Returns:
        Output (T, H, D) and LSE (H, T).

    Raises:
        InvalidInputError: shapes, dtypes or devices differ; output or output_lse shares memory
            with an input or with each other, or holds one element twice; checked, and an LSE is
            +inf.
    """
    check_merge(outputs, lses, output=output, output_lse=output_lse, checked=checked)
    merged, lse = _combine(outputs, lses)
    return _deliver(merged, output), _deliver(lse, output_lse)


def check_merge(
    outputs: Sequence[Tensor],
    lses: Sequence[Tensor],
    *,
    output: Tensor | None = None,
    output_lse: Tensor | None = None,
    checked: bool = False,
) -> None:
    """Refuse what `merge_many` refuses, for kernels that merge in its place; launches nothing.

    Raises:
        InvalidInputError: as `merge_many`.
    """
    require_list("outputs", outputs)
    require_list("lses", lses)
    _check_shards(outputs, lses)
    _check_out("output", output, outputs[0])
    _check_out("output_lse", output_lse, lses[0])
    _check_aliases(outputs, lses, output, output_lse)
    if checked:
        _check_contents(lses)


def to_natural(lse: Tensor, *, lse_base_on_e: bool) -> Tensor:
    """Return an LSE in natural log: as it is if it was, else log2 times ln 2.

    Args:
        lse: (H, T); -inf stays -inf.
        lse_base_on_e: what the implementation declares about the LSE that it returned.

    Raises:
        InvalidInputError: it is no tensor of floats.
    """
    require_floats("lse", lse)
    return lse if lse_base_on_e else lse * math.log(2.0)


def _combine(outputs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    empty = [lse.isinf() for lse in lses]
    logs = [torch.where(none, -math.inf, lse) for none, lse in zip(empty, lses, strict=True)]
    peak = logs[0]
    for log in logs[1:]:
        peak = torch.maximum(peak, log)
    shift = torch.where(peak == -math.inf, 0.0, peak)
    weights = [(log - shift).exp() for log in logs]
    total = weights[0]
    for weight in weights[1:]:
        total = total + weight
    total = torch.where(total == 0, 1.0, total)  # all are empty: 0 / 0 would give NaN gradients
    # Adding log(1) = +0 would turn an LSE of -0 into +0, which is no longer the same bits.
    lse = torch.where(total == 1, peak, peak + total.log())
    dtype = torch.promote_types(outputs[0].dtype, lse.dtype)
    # -0 is the neutral element of addition: 0 + (-0) is 0, but -0 + x is x for every x.
    merged = torch.full_like(outputs[0], -0.0, dtype=dtype, memory_format=torch.contiguous_format)
    for out, none, weight in zip(outputs, empty, weights, strict=True):
        # Before the product: whatever an empty side holds, no gradient may meet it.
        held = torch.where(_per_row(none), -0.0, out.to(dtype))
        merged = merged + held * _per_row(weight / total)
    merged = torch.where(_per_row(peak == -math.inf), 0.0, merged)
    return merged.to(outputs[0].dtype), lse


def _per_row(lse_like: Tensor) -> Tensor:
    """Turn (H, T) into (T, H, 1)."""
    return lse_like.T.unsqueeze(-1)


def _deliver(result: Tensor, out: Tensor | None) -> Tensor:
    return result if out is None else out.copy_(result)


def _check_shards(outputs: Sequence[Tensor], lses: Sequence[Tensor]) -> None:
    if not outputs or len(outputs) != len(lses):
        raise InvalidInputError.for_argument(
            "outputs, lses", f"of {len(outputs)} and {len(lses)} shards", "as many, at least one"
        )
    first = outputs[0]
    require_tensor("outputs[0]", first)
    require_tensor("lses[0]", lses[0])
    if first.dim() != 3 or first.dtype not in _OUTPUT_DTYPES:
        raise InvalidInputError.for_argument(
            "outputs[0]", _describe(first), "a floating tensor of 16, 32 or 64 bits, (T, H, D)"
        )
    if lses[0].dtype not in _LSE_DTYPES:
        raise InvalidInputError.for_argument("lses[0].dtype", lses[0].dtype, "float32 or float64")
    lse_shape = torch.Size((first.shape[1], first.shape[0]))
    for index, (output, lse) in enumerate(zip(outputs, lses, strict=True)):
        _check_like(f"outputs[{index}]", output, first.shape, first.dtype, first.device)
        _check_like(f"lses[{index}]", lse, lse_shape, lses[0].dtype, first.device)


def _check_out(name: str, out: Tensor | None, like: Tensor) -> None:
    if out is None:
        return
    _check_like(name, out, like.shape, like.dtype, like.device)
    if is_self_overlapping(out):
        raise InvalidInputError.for_argument(
            f"{name}.stride()", out.stride(), "strides that give each element its own memory"
        )


def _check_like(
    name: str, tensor: Tensor, shape: torch.Size, dtype: torch.dtype, device: torch.device
) -> None:
    require_tensor(name, tensor)
    if (tensor.shape, tensor.dtype, tensor.device) != (shape, dtype, device):
        allowed = f"{dtype} {tuple(shape)} on {device}"
        raise InvalidInputError.for_argument(name, _describe(tensor), allowed)


def _check_aliases(
    outputs: Sequence[Tensor],
    lses: Sequence[Tensor],
    output: Tensor | None,
    output_lse: Tensor | None,
) -> None:
    inputs = [(f"outputs[{index}]", tensor) for index, tensor in enumerate(outputs)]
    inputs += [(f"lses[{index}]", tensor) for index, tensor in enumerate(lses)]
    written = [("output", output), ("output_lse", output_lse)]
    for name, out in written:
        for other, tensor in inputs:
            if out is not None and overlaps(out, tensor):
                _refuse_alias(name, other)
    if output is not None and output_lse is not None and overlaps(output, output_lse):
        _refuse_alias("output", "output_lse")


def _refuse_alias(name: str, other: str) -> None:
    raise InvalidInputError.for_argument(
        name, f"sharing memory with {other}", "memory of its own", hint="pass a separate tensor."
    )


def _check_contents(lses: Sequence[Tensor]) -> None:
    for index, lse in enumerate(lses):
        count = int(lse.isposinf().sum())
        if count:
            raise InvalidInputError.for_argument(
                f"lses[{index}]",
                f"+inf at {count} of {lse.numel()} entries",
                "finite, or -inf for a row without keys",
                hint="normalise +inf to -inf where the kernel is called.",
            )


def _describe(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
