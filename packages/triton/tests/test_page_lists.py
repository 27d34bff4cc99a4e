"""Lists of pages by Triton, against a walk over each request's row, and against torch's."""

from __future__ import annotations

import pytest
import torch

from attn_shared import page_lists as by_torch
from attn_triton.page_lists import page_indices

COUNTS = [[3], [1, 1], [0, 4, 0, 2], [7, 0, 0], [0, 0], [1025, 1, 1024]]


def starts_of(counts: list[int]) -> torch.Tensor:
    return torch.tensor([sum(counts[:index]) for index in range(len(counts) + 1)]).int()


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("spare", [0, 3])
def test_rows_are_listed_as_far_as_they_are_used(
    counts: list[int], spare: int, device: torch.device
) -> None:
    shape = (len(counts), max(counts) + spare)
    table = torch.randint(0, 2**31 - 1, shape, generator=torch.Generator().manual_seed(0)).int()
    expected = [page for row, n in zip(table.tolist(), counts, strict=True) for page in row[:n]]
    starts, count = starts_of(counts), sum(counts)
    for find in (page_indices, by_torch.page_indices):
        found = find(table.to(device), starts, count)
        assert (found.dtype, found.device.type) == (torch.int32, device.type)
        assert found.tolist() == expected


def test_a_cut_of_a_wider_table_is_read_by_its_own_stride(device: torch.device) -> None:
    wide = torch.arange(40, dtype=torch.int32, device=device).reshape(4, 10)
    for table in (wide[1:, 3:8], wide.T[2:5, 1:]):
        counts = [2, 0, 3][: len(table)]
        expected = [page for row, n in zip(table.tolist(), counts, strict=True) for page in row[:n]]
        found = page_indices(table, starts_of(counts), sum(counts))
        assert found.tolist() == expected
