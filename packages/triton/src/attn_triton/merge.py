"""Merge two partial attention results with one Triton launch.

Means what `attn_shared.merge.merge_attn_states` means, and refuses the same calls.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_shared.gradients import is_differentiating, require_no_gradients
from attn_shared.merge import check_merge
from attn_triton.launch import AlignedLaunch, Launcher, vector_width

__all__ = ["merge_attn_states", "merge_into"]

_NAME = "attn_triton.merge"
_TILE_ELEMENTS = 2048
_MOST_PLANS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """A launch for all calls whose tensors differ in their addresses alone.

    `output_bytes` and `lse_bytes` are from a tensor's first byte to past its last: of two sides and
    of what is written.
    """

    launch: AlignedLaunch
    grid: tuple[int, int, int]
    rest: tuple[int, ...]
    output_bytes: tuple[int, int, int]
    lse_bytes: tuple[int, int, int]

    def may_alias(
        self,
        output_a: Tensor,
        output_b: Tensor,
        lse_a: Tensor,
        lse_b: Tensor,
        output: Tensor | None,
        output_lse: Tensor | None,
    ) -> bool:
        """Return whether a target's range of addresses meets another tensor's; seldom so."""
        read = [
            (output_a.data_ptr(), self.output_bytes[0]),
            (output_b.data_ptr(), self.output_bytes[1]),
            (lse_a.data_ptr(), self.lse_bytes[0]),
            (lse_b.data_ptr(), self.lse_bytes[1]),
        ]
        if output is not None:
            start, size = output.data_ptr(), self.output_bytes[2]
            if any(start < other + length and other < start + size for other, length in read):
                return True
            read.append((start, size))
        if output_lse is None:
            return False
        start, size = output_lse.data_ptr(), self.lse_bytes[2]
        return any(start < other + length and other < start + size for other, length in read)


_PLANS: dict[tuple[object, ...], _Plan] = {}


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
    """Merge two partial results over disjoint keys, on the current stream.

    A side whose LSE is infinite has no keys: its output is not read, and the other's comes out bit
    for bit; where both are empty the output is 0 and the LSE -inf. NaN in an LSE gives NaN. The
    first call with tensors of new strides or dtypes compiles, and cannot be captured in a graph.

    Args:
        output_a: (T, H, D), any strides.
        lse_a: (H, T), natural log, any strides.
        output_b: (T, H, D), of output_a's dtype.
        lse_b: (H, T), of lse_a's dtype.
        output: (T, H, D) to write to, of the same dtype, or None for a new tensor.
        output_lse: (H, T) to write to, of the same dtype, or None for a new tensor.
        checked: refuse an LSE of +inf, which reads the contents.

    Returns:
        Output (T, H, D) and LSE (H, T).

    Raises:
        InvalidInputError: shapes, dtypes or devices differ; output or output_lse shares memory
            with an input or with each other, or holds one element twice; checked, and an LSE is
            +inf.
        UnsupportedOptionError: a gradient is asked for.
    """
    outputs, lses = (output_a, output_b), (lse_a, lse_b)
    if is_differentiating():
        given = {"output_a": output_a, "lse_a": lse_a, "output_b": output_b, "lse_b": lse_b}
        require_no_gradients(_NAME, given | {"output": output, "output_lse": output_lse})
    facts = (*map(_facts, (output_a, lse_a, output_b, lse_b, output, output_lse)),)
    plan = _PLANS.get(facts)
    if plan is None or checked or plan.may_alias(*outputs, *lses, output, output_lse):
        check_merge(outputs, lses, output=output, output_lse=output_lse, checked=checked)
    if output is None:
        output = torch.empty_like(output_a, memory_format=torch.contiguous_format)
    if output_lse is None:
        output_lse = torch.empty_like(lse_a, memory_format=torch.contiguous_format)
    if plan is None:
        plan = _plan((*outputs, output), (*lses, output_lse))
        _remember(facts, plan)
    plan.launch(
        plan.grid,
        (output_a, lse_a, output_b, lse_b, output, output_lse),
        plan.rest,
    )
    return output, output_lse


def merge_into(total: Tensor, total_lse: Tensor, found: Tensor, found_lse: Tensor) -> None:
    """Merge a partial result into another in place, on the current stream; see `merge_attn_states`.

    Args:
        total: (T, H, D), any strides in which no element lies twice, written.
        total_lse: (H, T), natural log, likewise.
        found: (T, H, D) of any floating dtype; it is merged in total's. It shares no memory with
            total.
        found_lse: (H, T) of total_lse's dtype.

    Raises:
        InvalidInputError: shapes or devices differ.
        UnsupportedOptionError: a gradient is asked for.
    """
    if is_differentiating():
        given = {"total": total, "total_lse": total_lse, "found": found, "found_lse": found_lse}
        require_no_gradients(_NAME, given)
    facts = ("into", *map(_facts, (total, total_lse, found, found_lse)))
    plan = _PLANS.get(facts)
    if plan is None:
        check_merge((total, found.to(total.dtype)), (total_lse, found_lse))
        # A program reads what it writes before it writes, and no other program does.
        plan = _plan((total, found, total), (total_lse, found_lse, total_lse), in_place=True)
        _remember(facts, plan)
    tensors = (total, total_lse, found, found_lse, total, total_lse)
    plan.launch(plan.grid, tensors, plan.rest)


def _remember(facts: tuple[object, ...], plan: _Plan) -> None:
    if len(_PLANS) >= _MOST_PLANS:
        _PLANS.clear()
    _PLANS[facts] = plan


def _facts(tensor: Tensor | None) -> tuple[object, ...] | None:
    """Return what is checked about a tensor, all but where it lies."""
    if tensor is None:
        return None
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _span_bytes(tensor: Tensor) -> int:
    """Return how far it is from a tensor's first byte to past its last."""
    spans = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * stride for size, stride in spans)) * tensor.element_size()


def _plan(
    outputs: tuple[Tensor, ...], lses: tuple[Tensor, ...], *, in_place: bool = False
) -> _Plan:
    """Choose the widths of accesses and the constants of the kernel."""
    _, num_heads, size = outputs[0].shape
    steps = [output.stride(2) if size > 1 else 1 for output in outputs]
    strides = [int(stride) for output in outputs for stride in output.stride()[:2]]
    vector = vector_width(outputs[0].dtype, strides) if steps == [1, 1, 1] else 1
    width = 1 << (size - 1).bit_length()
    rows = max(1, _TILE_ELEMENTS // width)
    constants = {
        "HEADS": num_heads,
        "ROWS": rows,
        "SIZE": size,
        "WIDTH": width,
        "VECTOR": vector,
        "FIRST_STEP": steps[0],
        "SECOND_STEP": steps[1],
        "MERGED_STEP": steps[2],
        "IS_DOUBLE": torch.float64 in (outputs[0].dtype, lses[0].dtype),
        "IN_PLACE": in_place,
    }
    num_rows = outputs[0].shape[0] * num_heads
    first, second, merged = map(_span_bytes, outputs)
    first_lse, second_lse, merged_lse = map(_span_bytes, lses)
    return _Plan(
        launch=AlignedLaunch(_launcher(tuple(constants.items()))),
        grid=(-(-num_rows // rows), 1, 1),
        rest=(
            num_rows,
            *(stride // vector for stride in strides),
            *(stride for lse in lses for stride in lse.stride()),
        ),
        output_bytes=(first, second, merged),
        lse_bytes=(first_lse, second_lse, merged_lse),
    )


@functools.cache
def _launcher(constants: tuple[tuple[str, int], ...]) -> Launcher:
    from attn_triton.kernels.merge import merge_states

    return Launcher(merge_states, dict(constants))
