"""Block tables of a case: whose blocks lie where, and garbage where nobody may look."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attn_conformance.case import Case, TableStyle

__all__ = ["Placement", "place"]

_SPARE_COLUMNS = 2  # entries of garbage that even the longest row ends with
_POOL = 2  # blocks that `TableStyle.REPEATED` chooses from
_FAR_IDS = (2**30, -7)  # no cache has such blocks


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Placement:
    """Where a case's keys lie.

    Attributes:
        table: (B, M) int32 on the host.
        num_blocks: of the cache.
        block_ids: blocks whose content matters: those in use, and nobody's, which hold NaN.
        live_slots: slots that some row reads, each once.
        new_slots: slots of the step's new tokens, in the order of the batch; -1 for padding.
    """

    table: Tensor
    num_blocks: int
    block_ids: tuple[int, ...]
    live_slots: tuple[int, ...]
    new_slots: tuple[int, ...]


def place(case: Case, generator: torch.Generator, *, block_elements: int) -> Placement:
    """Give every row its blocks.

    Args:
        case: the batch.
        generator: of the random order.
        block_elements: elements from one block to the next, for a cache of a given span.
    """
    size = case.block_size
    counts = [-(-length // size) for length in case.seq_lens]
    shared = _num_shared(case)
    num_own = sum(counts) - shared * max(0, len(counts) - 1)
    pool = _POOL if case.table in (TableStyle.REPEATED, TableStyle.FREED_LEFT) else 0
    num_used = num_own + pool
    first = max(0, case.cache_elements // block_elements)
    ids = _ids(case, generator, num_used + 2, first)
    nobodys, used = ids[-2:], ids[:-2]
    pooled, own = used[:pool], used[pool:]
    rows = _rows(case, counts, shared, own, pooled, generator)
    width = max(counts, default=0) + _SPARE_COLUMNS
    garbage = (nobodys[0], *_FAR_IDS)
    table = [
        row + [garbage[(index + i) % len(garbage)] for i in range(width - len(row))]
        for index, row in enumerate(rows)
    ]
    return Placement(
        table=torch.tensor(table, dtype=torch.int32).reshape(len(rows), width),
        num_blocks=first + num_used + 2,
        block_ids=tuple(ids),
        live_slots=_live_slots(case, rows, pooled),
        new_slots=tuple(_new_slots(case, rows)),
    )


def _ids(case: Case, generator: torch.Generator, count: int, first: int) -> list[int]:
    if case.table is TableStyle.ORDERED:
        return list(range(first, first + count))
    return [first + i for i in torch.randperm(count, generator=generator).tolist()]


def _num_shared(case: Case) -> int:
    """Return how many leading blocks all rows have in common."""
    if case.common_prefix_len or case.table is not TableStyle.SHARED_PREFIX:
        return case.common_prefix_len // case.block_size
    return min(case.computed_lens, default=0) // case.block_size


def _rows(
    case: Case,
    counts: list[int],
    shared: int,
    own: list[int],
    pooled: list[int],
    generator: torch.Generator,
) -> list[list[int]]:
    prefix, own = own[:shared], own[shared:]
    rows = []
    for index, count in enumerate(counts):
        row, own = prefix + own[: count - shared], own[count - shared :]
        for entry in range(_num_replaced(case, index)):
            choice = 0
            if case.table is TableStyle.REPEATED:
                choice = int(torch.randint(_POOL, (), generator=generator))
            row[entry] = pooled[choice]
        rows.append(row)
    return rows


def _num_replaced(case: Case, request: int) -> int:
    """Return how many leading entries of a row name a block of the pool."""
    first_new = case.computed_lens[request]
    if case.table is TableStyle.REPEATED:
        return first_new // case.block_size
    if case.table is TableStyle.FREED_LEFT and case.window[0] is not None:
        first_seen = case.seq_lens[request] - case.query_lens[request] - case.window[0]
        return max(0, first_seen) // case.block_size
    return 0


def _live_slots(case: Case, rows: list[list[int]], pooled: list[int]) -> tuple[int, ...]:
    size = case.block_size
    found = dict.fromkeys(block * size + i for block in pooled for i in range(size))
    for row, length in zip(rows, case.seq_lens, strict=True):
        found.update(dict.fromkeys(_slots(row, size, 0, length)))
    return tuple(found)


def _new_slots(case: Case, rows: list[list[int]]) -> list[int]:
    slots: list[int] = []
    for index, row in enumerate(rows):
        length, first = case.seq_lens[index], case.computed_lens[index]
        if case.is_cross or length:
            slots += _slots(row, case.block_size, first, length)
        else:
            slots += [-1] * case.query_lens[index]
    return slots


def _slots(row: list[int], size: int, start: int, stop: int) -> list[int]:
    return [row[i // size] * size + i % size for i in range(start, stop)]
