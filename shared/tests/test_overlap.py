from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attn_shared._overlap import is_self_overlapping, overlaps

Layout = tuple[list[int], list[int], int]

layouts = st.integers(1, 3).flatmap(
    lambda rank: st.tuples(
        st.lists(st.integers(1, 4), min_size=rank, max_size=rank),
        st.lists(st.integers(0, 9), min_size=rank, max_size=rank),
        st.integers(0, 20),
    )
)


def view(storage: Tensor, layout: Layout) -> Tensor:
    shape, strides, offset = layout
    return storage.as_strided(shape, strides, offset)


def elements(tensor: Tensor) -> list[int]:
    """Return the storage index of every element, one by one."""
    indices = torch.arange(200)
    return (
        view(indices, (list(tensor.shape), list(tensor.stride()), tensor.storage_offset()))
        .flatten()
        .tolist()
    )


@settings(derandomize=True, max_examples=300, deadline=None)
@given(a=layouts, b=layouts)
def test_any_two_views_against_enumeration(a: Layout, b: Layout) -> None:
    storage = torch.zeros(200)
    first, second = view(storage, a), view(storage, b)
    assert overlaps(first, second) == bool(set(elements(first)) & set(elements(second)))


@settings(derandomize=True, max_examples=300, deadline=None)
@given(layout=layouts)
def test_any_view_against_itself(layout: Layout) -> None:
    tensor = view(torch.zeros(200), layout)
    places = elements(tensor)
    assert is_self_overlapping(tensor) == (len(set(places)) < len(places))


def test_views_that_interleave_do_not_overlap() -> None:
    pair = torch.zeros(5, 2, 3, 4)
    assert not overlaps(pair[:, 0], pair[:, 1])
    assert overlaps(pair[:, 0], pair[2:, 0])
    assert overlaps(pair[..., 1:3], pair[..., 2:])


def test_dtypes_are_compared_by_bytes() -> None:
    storage = torch.zeros(8)
    halves = storage.view(torch.float16)
    assert overlaps(storage[1:2], halves[3:4])
    assert not overlaps(storage[1:2], halves[4:5])


def test_no_data_no_overlap() -> None:
    tensor = torch.zeros(4)
    assert not overlaps(tensor[:0], tensor)
    assert not is_self_overlapping(tensor[:0])
    assert not overlaps(torch.zeros(4, device="meta"), torch.zeros(4, device="meta"))
    assert not overlaps(torch.zeros(4), torch.zeros(4))
    assert overlaps(tensor, tensor)


def test_large_views_cost_no_enumeration() -> None:
    # Ten million elements each; an enumeration would take seconds and gigabytes.
    pair = torch.empty(1000, 2, 100, 100)
    assert not overlaps(pair[:, 0], pair[:, 1])
    assert overlaps(pair[:, 0], pair.flatten()[19_980_000:])
