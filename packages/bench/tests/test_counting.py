from __future__ import annotations

import pytest
import torch
from attn_bench_testing import workload

from attn_bench.counting import count, visible_keys, visible_pairs
from attn_shared.errors import InvalidRequestError


@pytest.mark.parametrize(
    ("query_len", "seq_len", "pairs"),
    [
        (1, 1, 1),
        (1, 7, 7),
        (3, 3, 1 + 2 + 3),
        (2, 5, 4 + 5),
    ],
)
def test_pairs_under_a_causal_mask(query_len: int, seq_len: int, pairs: int) -> None:
    assert visible_pairs(query_len, seq_len) == pairs


@pytest.mark.parametrize("window", range(1, 10))
def test_a_window_leaves_each_row_its_last_keys(window: int) -> None:
    for query_len, seq_len in ((1, 1), (1, 8), (3, 8), (8, 8), (5, 6)):
        last = range(seq_len - query_len, seq_len)
        seen = [{*range(row + 1)[-window:]} for row in last]
        assert visible_pairs(query_len, seq_len, window) == sum(map(len, seen))
        assert visible_keys(query_len, seq_len, window) == len(set().union(*seen))


def test_a_windowed_decode_by_hand() -> None:
    work = count(workload((1, 1), (5, 9), window=6))
    assert work.kv_bytes == (5 + 6) * 2 * 2 * 8 * 4
    assert work.operations == (5 + 6) * 4 * 8 * 4


def test_a_window_over_a_shared_prefix_is_not_counted() -> None:
    with pytest.raises(InvalidRequestError, match="window"):
        count(workload((1, 1), (10, 9), shared_prefix_len=6, window=3))


def test_decode_by_hand() -> None:
    work = count(workload((1, 1), (5, 9)))
    assert work.kv_bytes == (5 + 9) * 2 * 2 * 8 * 4  # keys, K and V, kv heads, size, bytes
    assert work.io_bytes == 2 * 2 * 4 * 8 * 4  # in and out, tokens, heads, size, bytes
    assert work.num_bytes == work.kv_bytes + work.io_bytes
    assert work.operations == (5 + 9) * 4 * 8 * 2 * 2  # pairs, heads, size, products, mul and add


def test_prefill_by_hand() -> None:
    work = count(workload((3,), (4,)))
    assert work.kv_bytes == 4 * 2 * 2 * 8 * 4
    assert work.operations == (2 + 3 + 4) * 4 * 8 * 4


def test_a_shared_prefix_is_read_once() -> None:
    work = count(workload((1, 1, 1), (10, 9, 8), shared_prefix_len=6))
    assert work.kv_bytes == (6 + 4 + 3 + 2) * 2 * 2 * 8 * 4
    assert work.operations == (10 + 9 + 8) * 4 * 8 * 4


@pytest.mark.parametrize(
    ("dtype", "kv_cache_dtype", "entry"),
    [
        (torch.bfloat16, "auto", 8 * 2),
        (torch.bfloat16, "float32", 8 * 4),
        (torch.bfloat16, "fp8", 8),
        (torch.bfloat16, "int8_per_token_head", 8 + 4),
    ],
)
def test_bytes_of_a_stored_key(dtype: torch.dtype, kv_cache_dtype: str, entry: int) -> None:
    work = count(workload((1,), (5,), dtype=dtype, kv_cache_dtype=kv_cache_dtype))
    assert work.kv_bytes == 5 * 2 * 2 * entry
    assert work.io_bytes == 2 * 4 * 8 * 2


def test_a_packed_cache_is_not_counted() -> None:
    with pytest.raises(InvalidRequestError, match="nvfp4"):
        count(workload(kv_cache_dtype="nvfp4"))
