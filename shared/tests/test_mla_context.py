"""Long contexts in chunks: every key once, in order, never more than the bound."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attn_shared.mla_context import (
    ContextPieces,
    context_chunks,
    context_tokens,
    cut_context,
    prefix_sums,
    ragged_part,
)
from attn_shared.request import MLADims
from attn_shared.spec import LayerSpec

CPU = torch.device("cpu")


def spans(pieces: list[ContextPieces]) -> dict[int, list[tuple[int, int]]]:
    """Return (start, stop) of each request's pieces, in order."""
    found: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for chunk in pieces:
        for index, (start, length) in enumerate(zip(chunk.starts, chunk.lens, strict=True)):
            found[chunk.first + index].append((start, start + length))
    return found


@given(
    st.lists(st.integers(0, 40), max_size=6),
    st.integers(1, 16),
    st.booleans(),
)
def test_every_key_is_in_one_piece_and_no_chunk_is_too_large(
    lens: list[int], most: int, is_invariant: bool
) -> None:
    pieces = cut_context(lens, most, is_invariant=is_invariant)
    found = spans(pieces)
    for request, length in enumerate(lens):
        positions = [p for start, stop in found[request] for p in range(start, stop)]
        assert positions == list(range(length))
    assert all(0 < sum(chunk.lens) <= most for chunk in pieces)
    assert all(min(chunk.lens) > 0 for chunk in pieces)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=5), st.integers(1, 16))
def test_invariant_pieces_are_those_of_a_request_alone(lens: list[int], most: int) -> None:
    together = spans(cut_context(lens, most, is_invariant=True))
    for request, length in enumerate(lens):
        alone = spans(cut_context([length], most, is_invariant=True))
        assert together[request] == alone[0]


def test_neighbours_share_a_chunk_and_a_fresh_prompt_ends_it() -> None:
    assert cut_context([3, 4, 0, 2], 8) == [
        ContextPieces(first=0, starts=(0, 0), lens=(3, 4)),
        ContextPieces(first=3, starts=(0,), lens=(2,)),
    ]
    assert cut_context([6, 5], 8) == [
        ContextPieces(first=0, starts=(0, 0), lens=(6, 2)),
        ContextPieces(first=1, starts=(2,), lens=(3,)),
    ]


def test_chunks_name_the_rows_and_slots_of_their_keys() -> None:
    """Two requests of 2 and 3 rows over blocks of 4; the second's keys begin in its block 9."""
    table = torch.tensor([[5, 2], [9, 7]], dtype=torch.int32)
    starts = torch.tensor([0, 2, 5], dtype=torch.int32)
    pieces = [
        ContextPieces(first=0, starts=(0, 0), lens=(5, 1)),
        ContextPieces(first=1, starts=(1,), lens=(6,)),
    ]
    first, second = context_chunks(pieces, starts, table, 4)
    assert first.rows == slice(0, 5)
    assert first.slots.tolist() == [20, 21, 22, 23, 8, 36]
    assert first.part.query_start_loc.tolist() == [0, 2, 5]
    assert first.part.key_start_loc.tolist() == [0, 5, 6]
    assert not first.part.is_causal
    assert second.rows == slice(2, 5)
    assert second.slots.tolist() == [37, 38, 39, 28, 29, 30]
    assert (second.part.max_query_len, second.part.max_key_len) == (3, 6)


@pytest.mark.parametrize(
    ("workspace", "tokens"),
    # One head: 24 for the entry, 8 + 12 projected, and two padded widths of 8 + 8: 76 numbers.
    [(1, 4), (76 * 2 * 4, 4), (76 * 2 * 11, 8), (76 * 2 * 12, 12)],
)
def test_a_workspace_holds_whole_blocks_and_at_least_one(workspace: int, tokens: int) -> None:
    dims = MLADims(kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=12)
    spec = LayerSpec(
        num_heads=1,
        num_kv_heads=1,
        head_size=24,
        head_size_v=16,
        scale=1.0,
        dtype=torch.bfloat16,
        mla=dims,
    )
    assert context_tokens(spec, workspace, 4) == tokens


def test_an_empty_part() -> None:
    part = ragged_part(prefix_sums([]), prefix_sums([]), CPU, is_causal=True)
    assert (part.num_queries, part.num_keys, part.max_query_len, part.max_key_len) == (0, 0, 0, 0)
