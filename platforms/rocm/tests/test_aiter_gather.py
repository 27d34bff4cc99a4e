"""Where keys lie, which caches the paged prefill may read, and rows gathered from the others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from aiter_testing import common_of

from attn_rocm._aiter_gather import gathered, is_in_reach
from attn_rocm._aiter_steps import PromptStep, places_of


def step_of(lens: list[int], table: list[list[int]], num_keys: int) -> PromptStep:
    return PromptStep(
        query_start_loc=torch.zeros(len(lens) + 1, dtype=torch.int32),
        max_query_len=2,
        max_key_len=max(2, *lens),
        causal=True,
        num_keys=num_keys,
        key_lens=torch.tensor(lens, dtype=torch.int32),
        block_table=torch.tensor(table, dtype=torch.int32),
    )


def test_places_of_every_key_request_by_request() -> None:
    places = places_of(step_of([3, 0, 5], [[7, 9], [1, 1], [4, 2]], 8), 4)
    assert places.starts.tolist() == [0, 3, 3, 8]
    assert places.blocks.tolist() == [7, 7, 7, 4, 4, 4, 4, 2]
    assert places.offsets.tolist() == [0, 1, 2, 0, 1, 2, 3, 0]
    assert places.page_indices(8).tolist() == [56, 57, 58, 32, 33, 34, 35, 16]
    assert places.page_indices(8).dtype is torch.int32


def test_a_bound_above_the_keys_leaves_places_of_the_first_block() -> None:
    places = places_of(step_of([2, 1], [[7], [4]], 6), 4)
    assert places.starts.tolist() == [0, 2, 3]
    assert places.page_indices(4).tolist() == [28, 29, 16, 0, 0, 0]


def test_a_batch_without_keys_has_no_places() -> None:
    places = places_of(step_of([0, 0], [[1], [1]], 0), 4)
    assert (places.starts.tolist(), places.blocks.tolist()) == ([0, 0, 0], [])


def test_a_step_without_a_cache_has_no_places() -> None:
    common: Any = common_of([1], [1])
    step = PromptStep(
        query_start_loc=common.query_start_loc,
        max_query_len=2,
        max_key_len=2,
        causal=True,
        num_keys=1,
    )
    with pytest.raises(TypeError, match="no cache"):
        places_of(step, 4)


@pytest.mark.parametrize(
    ("num_blocks", "stride", "is_read"),
    # The last element ends at (num_blocks - 1) * stride + 32, of two bytes each; 2**30 is the end.
    [(1024, 2**20, True), (1025, 2**20, False), (2, 2**30 - 32, True), (2, 2**30 - 24, False)],
)
def test_a_cache_past_31_bits_of_bytes_is_not_read_by_pages(
    num_blocks: int, stride: int, is_read: bool
) -> None:
    """Nothing is touched of what stands for so much memory."""
    view = torch.empty(1, dtype=torch.bfloat16).untyped_storage()
    view.resize_(2 * ((num_blocks - 1) * stride + 32))
    pages = torch.empty(0, dtype=torch.bfloat16).set_(
        view, 0, (num_blocks, 4, 1, 8), (stride, 8, 8, 1)
    )
    assert is_in_reach(pages) is is_read


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e4m3fnuz])
def test_fp8_is_widened_and_scaled(dtype: torch.dtype) -> None:
    stored = torch.tensor([1.0, 2.0, 4.0, 8.0]).reshape(2, 2, 1, 1).to(dtype)
    places = places_of(step_of([3], [[1, 0]], 3), 2)
    rows = gathered(stored, places, torch.tensor([0.5]), torch.bfloat16)
    assert rows.dtype is torch.bfloat16
    assert rows[:, 0, 0].tolist() == [2.0, 4.0, 0.5]


def test_other_caches_are_taken_as_they_are() -> None:
    stored = torch.arange(4, dtype=torch.float16).reshape(2, 2, 1, 1)
    places = places_of(step_of([3], [[1, 0]], 3), 2)
    rows = gathered(stored, places, None, torch.float16)
    assert rows[:, 0, 0].tolist() == [2.0, 3.0, 0.0]


@pytest.mark.parametrize(
    ("address", "is_read"), [(2**32, True), (2**33 - 64, True), (2**33 - 62, False)]
)
def test_a_cache_across_a_multiple_of_4_gib_is_not_read_by_pages(
    address: int, is_read: bool
) -> None:
    """Its kernel adds 32-bit offsets to the low half of the address."""
    pages: Any = SimpleNamespace(
        shape=(1, 4, 1, 8),
        stride=lambda: (32, 8, 8, 1),
        element_size=lambda: 2,
        device=torch.device("cuda"),
        data_ptr=lambda: address,
    )
    assert is_in_reach(pages) is is_read
