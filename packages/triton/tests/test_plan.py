"""Work items on the device: how requests are cut, and where blocks of rows begin."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from attn_triton._steps import plan_ints
from attn_triton.kernels.plan import HEADER, RECORD, plan_step
from attn_triton.launch import Launcher


def planned(
    device: torch.device,
    query_lens: list[int],
    seq_lens: list[int],
    *,
    slots: int,
    max_items: int = 12,
    decode_rows: int = 4,
    **constants: Any,
) -> tuple[list[list[int]], list[int], list[int]]:
    """Return the items, the first item of each request, and the first block of each."""

    starts = torch.tensor([0, *query_lens]).cumsum(0).to(device=device, dtype=torch.int32)
    lens = torch.tensor(seq_lens, dtype=torch.int32, device=device)
    count = len(query_lens)
    plan = torch.full((HEADER + RECORD * max_items + 3 * (count + 1),), -7, dtype=torch.int32)
    plan = plan.to(device)
    plain = {"LEFT": -1, "CHUNK": 0, "DENSE": False, "TILE": 8, "MAX_PARTS": 0, "LEAST": 2}
    launcher = Launcher(plan_step, {**plain, "BLOCK_B": 16, **constants})
    launcher((1, 1, 1), plan, starts, lens, count, max_items, slots, decode_rows, 3, 16)
    found = plan.tolist()
    items = [found[HEADER + RECORD * i :][:4] for i in range(found[0])]
    rest = found[HEADER + RECORD * max_items :]
    assert found[1] == rest[2 * count + 1]
    return items, rest[: count + 1], rest[count + 1 : 2 * count + 2]


def test_a_plan_has_the_room_that_builders_give_it(device: torch.device) -> None:
    """What lies behind it stays as it was."""
    size = plan_ints(12, 3)
    plan = torch.full((size + 8,), -7, dtype=torch.int32, device=device)
    starts = torch.tensor([0, 1, 3, 4], dtype=torch.int32, device=device)
    lens = torch.tensor([40, 13, 3], dtype=torch.int32, device=device)
    constants = {"LEFT": -1, "CHUNK": 0, "DENSE": False, "TILE": 8, "MAX_PARTS": 0, "LEAST": 2}
    launcher = Launcher(plan_step, {**constants, "BLOCK_B": 16})
    launcher((1, 1, 1), plan, starts, lens, 3, 12, 6, 4, 3, 16)
    assert plan[size:].tolist() == [-7] * 8
    assert plan[size - 2].item() == 1  # parts of the last request


def test_one_wave_is_filled(device: torch.device) -> None:
    """Tiles of 8 keys: 5, 2 and 1 of them; with parts of 2 tiles 3 + 1 + 1 fit 6, of 1 not."""
    items, first, blocks = planned(device, [1, 2, 1], [40, 13, 3], slots=6)
    assert items == [
        [0, 0, 16, 3],
        [0, 16, 32, 3],
        [0, 32, 40, 3],
        [1, 0, 13, 1],
        [2, 0, 3, 1],
    ]
    assert first == [0, 3, 4, 5]
    assert blocks == [0, 0, 0, 0]


def test_a_record_says_what_decode_must_know_of_its_request(device: torch.device) -> None:
    """Keys, first query token and query tokens; the second request is of one token after three."""
    starts = torch.tensor([0, 3, 4], dtype=torch.int32, device=device)
    lens = torch.tensor([20, 9], dtype=torch.int32, device=device)
    plan = torch.zeros(plan_ints(4, 2), dtype=torch.int32, device=device)
    constants = {"LEFT": -1, "CHUNK": 0, "DENSE": False, "TILE": 8, "MAX_PARTS": 0, "LEAST": 2}
    launcher = Launcher(plan_step, {**constants, "BLOCK_B": 16})
    launcher((1, 1, 1), plan, starts, lens, 2, 4, 4, 4, 3, 16)
    found = plan.tolist()
    records = [found[HEADER + RECORD * i :][:7] for i in range(found[0])]
    own = {0: [20, 0, 3], 1: [9, 3, 1]}
    assert len(records) > 1
    assert all(record[4:] == own[record[0]] for record in records)


def test_short_requests_share_a_slot(device: torch.device) -> None:
    """2, 2 and 12 tiles of 8 keys in 3 slots: parts of 6 tiles leave one for the short ones."""
    items, first, _ = planned(device, [1, 1, 1], [16, 16, 96], slots=3)
    assert items == [[2, 0, 48, 2], [2, 48, 96, 2], [0, 0, 16, 1], [1, 0, 16, 1]]
    assert first == [2, 3, 0, 4]
    items, _, _ = planned(device, [1, 1, 1], [16, 16, 96], slots=3, max_items=3)
    assert [item[3] for item in items] == [1, 1, 1]  # no record is left for a second part


def test_nothing_is_cut_without_slots(device: torch.device) -> None:
    items, first, _ = planned(device, [1, 1], [100, 3], slots=0)
    assert items == [[0, 0, 100, 1], [1, 0, 3, 1]]
    assert first == [0, 1, 2]


def test_longer_queries_are_left_to_blocks_of_rows(device: torch.device) -> None:
    """7 tokens of 3 heads are 21 rows, 2 blocks of 16; 20 tokens 60 rows, 4 blocks."""
    items, first, blocks = planned(device, [7, 1, 0, 20], [9, 8, 50, 20], slots=4)
    assert items == [[1, 0, 8, 1]]
    assert (first[1], first[4]) == (0, 1)  # those of requests without items are not looked at
    assert blocks == [0, 2, 2, 2, 6]


def test_padded_rows_are_items_without_keys(device: torch.device) -> None:
    items, _, _ = planned(device, [1, 1], [0, 9], slots=2)
    assert items == [[1, 0, 9, 1], [0, 0, 0, 1]]


@pytest.mark.parametrize(
    ("constants", "start"),
    [({"LEFT": 9}, 40 - 2 - 9), ({"CHUNK": 16}, 32), ({"LEFT": 3, "CHUNK": 16}, 35)],
)
def test_keys_that_no_row_sees_are_no_work(
    device: torch.device, constants: dict[str, int], start: int
) -> None:
    """Two query tokens at positions 38 and 39: the first of them sees the leftmost key."""
    items, _, _ = planned(device, [2], [40], slots=1, **constants)
    assert items == [[0, start, 40, 1]]


def test_invariant_parts_depend_on_the_request_alone(device: torch.device) -> None:
    """At most 3 parts of at least 2 tiles: 9 tiles in parts of 3, 3 tiles in parts of 2."""
    mode = {"MAX_PARTS": 3, "LEAST": 2}
    items, _, _ = planned(device, [1, 1], [70, 20], slots=0, **mode)
    assert items[:3] == [[0, 0, 24, 3], [0, 24, 48, 3], [0, 48, 70, 3]]
    assert items[3:] == [[1, 0, 16, 2], [1, 16, 20, 2]]
    alone, _, _ = planned(device, [1], [20], slots=0, **mode)
    assert [item[1:] for item in alone] == [item[1:] for item in items[3:]]


def test_without_a_cache_all_are_blocks(device: torch.device) -> None:
    items, _, blocks = planned(device, [1, 6], [1, 7], slots=0, decode_rows=0, DENSE=True)
    assert items == []
    assert blocks == [0, 1, 3]
