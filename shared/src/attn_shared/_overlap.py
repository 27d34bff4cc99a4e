"""Whether two strided views share a byte, exactly, from addresses and strides alone."""

from __future__ import annotations

from torch import Tensor

__all__ = ["is_self_overlapping", "overlaps"]

_Term = tuple[int, int, int]
"""A stride in bytes, and the least and greatest integer that multiplies it."""


def overlaps(a: Tensor, b: Tensor) -> bool:
    """Return whether any byte belongs to both tensors.

    Two views of one storage that interleave without meeting do not overlap. Tensors without data
    (meta) never do.
    """
    if a.device != b.device or a.device.type == "meta" or not a.numel() or not b.numel():
        return False
    # A shared byte solves start_a + sum(s * i) = start_b + sum(s * j) within the shapes.
    terms = _terms(a, 1) + _terms(b, -1)
    return _reaches(b.data_ptr() - a.data_ptr(), _merged(terms))


def is_self_overlapping(tensor: Tensor) -> bool:
    """Return whether two indices of one tensor share a byte, as an expanded dimension does."""
    size = tensor.element_size()
    dims = sorted(
        (stride * size, count)
        for stride, count in zip(tensor.stride(), tensor.shape, strict=True)
        if count > 1
    )
    if tensor.numel() == 0:
        return False
    # For two different indices, their first differing axis d has a difference of 1 or more there.
    for axis, (stride, count) in enumerate(dims):
        others = [(other, 1 - n, n - 1) for other, n in dims[:axis]]
        byte = (1, 1 - size, size - 1)
        if _reaches(0, _merged([(stride, 1, count - 1), *others, byte])):
            return True
    return False


def _terms(tensor: Tensor, sign: int) -> list[_Term]:
    """Return the terms of all byte addresses of a tensor relative to its start."""
    size = tensor.element_size()
    spans = [
        (stride * size, count) for stride, count in zip(tensor.stride(), tensor.shape, strict=True)
    ]
    spans.append((1, size))
    return [(step, min(0, sign * (n - 1)), max(0, sign * (n - 1))) for step, n in spans]


def _merged(terms: list[_Term]) -> list[_Term]:
    """Return one term per stride, the largest stride first, without strides that move nothing."""
    bounds: dict[int, tuple[int, int]] = {}
    for step, low, high in terms:
        if step:
            before = bounds.get(step, (0, 0))
            bounds[step] = (before[0] + low, before[1] + high)
    return [(step, *bounds[step]) for step in sorted(bounds, reverse=True)]


def _reaches(target: int, terms: list[_Term]) -> bool:
    """Return whether integers within their bounds make sum(step * n) equal to target.

    Only multiples that leave a remainder within the reach of the smaller strides are tried, which
    for views of a dense buffer is one or two per stride.
    """
    if not terms:
        return target == 0
    (step, low, high), rest = terms[0], terms[1:]
    least = sum(each * lower for each, lower, _ in rest)
    most = sum(each * upper for each, _, upper in rest)
    first = max(low, -((most - target) // step))
    last = min(high, (target - least) // step)
    return any(_reaches(target - step * n, rest) for n in range(first, last + 1))
