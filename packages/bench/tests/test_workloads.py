from __future__ import annotations

import pytest
import torch
from attn_bench_testing import workload

from attn_bench.workloads import Heads, WorkloadPhase
from attn_shared.errors import InvalidInputError, InvalidRequestError


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
        ((1,), (4,), {"window": 0}, "window"),
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


def test_fields_are_changed_and_checked_again() -> None:
    changed = workload().with_fields(dtype=torch.bfloat16)
    assert changed.dtype is torch.bfloat16
    with pytest.raises(InvalidRequestError):
        workload().with_fields(query_lens=(6, 1))


def test_what_is_asked_beside_lengths_is_part_of_the_name() -> None:
    asked = workload((1,), (64,), window=16, returns_lse=True, own_output=True)
    assert asked.shape == "1x64 window 16 +LSE own out"
    assert asked.base_shape == "1x64"


@pytest.mark.parametrize(("window", "sides"), [(None, (None, None)), (1, (0, 0)), (16, (15, 0))])
def test_a_window_holds_the_tokens_own_key(
    window: int | None, sides: tuple[int | None, int | None]
) -> None:
    assert workload(window=window).window_sides == sides
