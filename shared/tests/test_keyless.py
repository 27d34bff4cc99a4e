"""Requests without keys: found, handed keys, and their rows set."""

from __future__ import annotations

import math

import torch

from attn_shared.keyless import Keyless, keyless_of
from attn_shared.step_buffers import Buffers

CPU = torch.device("cpu")


def found(*, is_kept: bool = False) -> Keyless:
    """Requests of 1, 2 and 1 tokens, of which the second has no keys; 4 rows."""
    return keyless_of(
        torch.tensor([0, 1, 3, 4], dtype=torch.int32),
        torch.tensor([5, 0, 2], dtype=torch.int32),
        num_tokens=4,
        num_columns=3,
        buffers=Buffers(CPU, is_kept=is_kept),
    )


def test_requests_and_rows_without_keys() -> None:
    keyless = found()
    assert keyless.requests.tolist() == [False, True, False]
    assert keyless.rows.tolist() == [False, True, True, False]


def test_their_row_of_the_table_names_block_0_and_is_wide_enough() -> None:
    table = torch.tensor([[7, 8], [2**30, 2**30], [9, 2**30]], dtype=torch.int32)
    keyed = found().table(table)
    assert keyed.tolist() == [[7, 8, 0], [0, 0, 0], [9, 2**30, 0]]


def test_a_captured_table_stays_at_its_address() -> None:
    keyless = found(is_kept=True)
    table = torch.ones(3, 2, dtype=torch.int32)
    first = keyless.table(table)
    table.fill_(6)
    assert keyless.table(table).data_ptr() == first.data_ptr()
    assert first[0].tolist() == [6, 6, 0]


def test_their_output_is_0_and_their_lse_minus_infinity() -> None:
    output, lse = torch.full((4, 2, 3), math.nan), torch.zeros(2, 4)
    found().blank(output, lse)
    assert output[1:3].eq(0).all()
    assert output[[0, 3]].isnan().all()
    assert lse[0].tolist() == [0.0, -math.inf, -math.inf, 0.0]
    found().blank(output, None)
