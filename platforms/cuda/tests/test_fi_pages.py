"""Page lists against a walk through each request's blocks, one by one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attn_cuda._fi_pages import page_indices, pages_of, require_pages
from attn_shared.errors import MetadataError
from attn_shared.page_lists import page_indices as list_pages


def walked(lens: list[int], table: list[list[int]], size: int) -> tuple[list[int], ...]:
    """Return starts, page numbers and last lengths by walking over tokens."""
    starts, indices, last = [0], [], []
    for length, row in zip(lens, table, strict=True):
        used = {position // size for position in range(length)}
        indices += [row[column] for column in sorted(used)]
        starts.append(len(indices))
        in_last = sum(position // size == max(used) for position in range(length)) if used else 0
        last.append(in_last)
    return starts, indices, last


@given(
    lens=st.lists(st.integers(0, 70), max_size=6),
    size=st.sampled_from([1, 4, 15, 16, 32]),
    spare=st.integers(0, 3),
    seed=st.integers(0, 99),
)
def test_pages_are_those_that_tokens_lie_in(
    lens: list[int], size: int, spare: int, seed: int
) -> None:
    columns = max([-(-length // size) for length in lens], default=0) + spare
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randperm(max(1, len(lens) * columns), generator=generator).int()
    table = ids[: len(lens) * columns].reshape(len(lens), columns)

    pages = pages_of(torch.tensor(lens, dtype=torch.int32), size)
    indices = page_indices(table, pages, list_pages)

    found = (pages.starts.tolist(), indices.tolist(), pages.last_lens.tolist())
    assert found == walked(lens, table.tolist(), size)
    assert pages.count == len(indices)
    assert {pages.starts.dtype, pages.last_lens.dtype, indices.dtype} == {torch.int32}


def test_entries_past_the_last_page_are_not_read() -> None:
    table = torch.tensor([[3, -7, 2**30], [5, 6, -1]], dtype=torch.int32)
    pages = pages_of(torch.tensor([4, 17], dtype=torch.int32), 16)
    assert page_indices(table, pages, list_pages).tolist() == [3, 5, 6]


def test_a_length_that_the_table_does_not_hold_is_refused_with_both_numbers() -> None:
    table = torch.zeros(2, 3, dtype=torch.int32)
    require_pages(torch.tensor([48, 1], dtype=torch.int32), table, 16)
    with pytest.raises(MetadataError, match=r"seq_lens of request 1 .*49.* at most 48, in 3 col"):
        require_pages(torch.tensor([48, 49], dtype=torch.int32), table, 16)
