from __future__ import annotations

import pytest
import torch
from attn_bench_testing import workload

from attn_bench.sets import SETS, workload_set
from attn_bench.workloads import Heads, WorkloadPhase
from attn_shared.errors import InvalidInputError, InvalidRequestError, UnknownNameError


def test_heads_are_written_as_they_are_read() -> None:
    heads = Heads.parse(" 9/3x64 ")
    assert (heads.num_heads, heads.num_kv_heads, heads.head_size) == (9, 3, 64)
    assert str(heads) == "9/3x64"


@pytest.mark.parametrize("text", ["32x128", "32/8", "a/8x128", "32/8x-1", ""])
def test_heads_written_otherwise_are_refused(text: str) -> None:
    with pytest.raises(InvalidInputError, match=r"heads is .* as 32/8x128"):
        Heads.parse(text)


@pytest.mark.parametrize("text", ["9/2x64", "0/1x64", "4/0x64", "4/2x0"])
def test_heads_that_no_layer_has_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="multiple of kv heads"):
        Heads.parse(text)


@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "fields", "complaint"),
    [
        ((), (), {}, "seq_lens"),
        ((1,), (4, 4), {}, "one length per request"),
        ((0,), (4,), {}, "1 to seq_len=4"),
        ((5,), (4,), {}, "1 to seq_len=4"),
        ((1, 2), (9, 6), {"shared_prefix_len": 5}, "0 to 4"),
        ((1,), (4,), {"shared_prefix_len": -1}, "shared_prefix_len"),
        ((1,), (4,), {"block_size": 0}, "block_size"),
    ],
)
def test_lengths_that_are_no_batch_are_refused(
    query_lens: tuple[int, ...], seq_lens: tuple[int, ...], fields: dict, complaint: str
) -> None:
    with pytest.raises(InvalidRequestError, match=complaint):
        workload(query_lens, seq_lens, **fields)


def test_what_a_workload_says_of_itself() -> None:
    mixed = workload((1, 3), (9, 6))
    assert (mixed.batch, mixed.num_tokens, mixed.context, mixed.query_len) == (2, 4, 9, 3)
    assert not mixed.is_uniform
    assert workload((2, 2), (7, 7)).is_uniform


def test_names() -> None:
    decode = workload((1,) * 3, (64,) * 3)
    assert decode.name == "decode 3x64 4/2x8 float32"
    chunk = workload((16,), (64,), phase=WorkloadPhase.CHUNKED, kv_cache_dtype="fp8")
    assert chunk.name == "chunked 1x16@64 4/2x8 float32 fp8 cache"
    assert workload(label="noon").shape == "noon"


def test_sets_come_in_order_and_each_workload_once() -> None:
    decode, full = SETS["decode"], SETS["full"]
    assert workload_set(["decode", "full"]) == full
    assert full[: len(decode)] == decode
    assert len(set(full)) == len(full)


def test_decode_set_by_hand() -> None:
    lengths = [(w.batch, w.context, w.query_len) for w in SETS["decode"]]
    assert lengths == [
        (1, 1024, 1), (1, 4096, 1), (8, 1024, 1), (8, 4096, 1), (32, 1024, 1), (32, 4096, 1),
    ]  # fmt: skip


def test_mixed_workloads_put_decodes_first() -> None:
    first = SETS["mixed"][0]
    assert first.query_lens == (1, 1, 1, 1, 1, 1, 256, 512)
    assert first.seq_lens == (682, 1365, 2048, 2730, 3413, 4096, 256, 512)


def test_an_unknown_set_comes_with_those_that_exist() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown workload 'decod'.*long-decode.*decode"):
        workload_set(["decod"])


def test_fields_are_changed_and_checked_again() -> None:
    changed = workload().with_fields(dtype=torch.bfloat16)
    assert changed.dtype is torch.bfloat16
    with pytest.raises(InvalidRequestError):
        workload().with_fields(query_lens=(6, 1))
