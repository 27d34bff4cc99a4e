"""What kernels can load 16 bytes at a time, and what is copied for them."""

from __future__ import annotations

import pytest
import torch

from attn_shared.alignment import aligned, dense_rows, is_aligned


def test_rows_that_lie_well_are_handed_on() -> None:
    rows = torch.zeros(4, 2, 8, dtype=torch.bfloat16)
    assert aligned(rows) is rows
    assert is_aligned(torch.zeros(4, 6, 16, dtype=torch.bfloat16)[:, 2:4, 8:])


@pytest.mark.parametrize(
    "rows",
    [
        torch.zeros(65, dtype=torch.bfloat16)[1:].reshape(4, 2, 8),
        torch.zeros(4, 2, 9, dtype=torch.bfloat16)[..., :8],
        torch.zeros(4, 8, 2, dtype=torch.bfloat16).transpose(1, 2),
        torch.zeros(4, 20, dtype=torch.bfloat16)[:, :16].unflatten(1, (2, 8)),
    ],
    ids=["offset", "head-stride", "last-stride", "row-stride"],
)
def test_rows_that_do_not_are_copied(rows: torch.Tensor) -> None:
    copied = aligned(rows)
    assert copied is not rows
    assert is_aligned(copied)
    assert torch.equal(copied, rows)


def test_a_table_with_columns_apart_is_copied() -> None:
    table = torch.arange(6, dtype=torch.int32).reshape(2, 3)
    assert dense_rows(table) is table
    assert dense_rows(table.T).stride() == (2, 1)
    assert dense_rows(table[:, :1]).stride() == (3, 1)
