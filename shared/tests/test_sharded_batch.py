"""Describing a batch over sharded sequences. (Groups of more than one rank: tests/layer_ranks.)"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attn_shared.errors import InvalidRequestError, MetadataError
from attn_shared.ranks import ContextParallel
from attn_shared.sharded_batch import blocks_per_rank, sharded_batch


class Place(ContextParallel):
    """One of two ranks, without a group."""

    dcp_size = 2
    dcp_rank = 1


def described(place: ContextParallel, **options: Any) -> Any:
    given = {"query_lens": [2, 1], "seq_lens": [5, 3], "block_size": 2}
    given["block_table"] = torch.tensor([[4, 7, 9], [5, 2, 0]])
    return sharded_batch(place=place, **{**given, **options})


def test_slots_and_shares_of_a_rank() -> None:
    common = described(Place())
    # Tokens 3 and 4 of request 0: rank 1 holds 1 and 3, the latter its second, in block 4.
    # Token 2 of request 1 is rank 0's.
    assert common.slot_mapping.tolist() == [9, -1, -1]
    assert common.dcp_local_seq_lens.tolist() == [2, 1]
    assert common.dcp_local_seq_lens_cpu.tolist() == [2, 1]
    assert common.seq_lens.tolist() == [5, 3]
    assert common.block_size == 2


def test_one_rank_is_a_batch_like_any_other() -> None:
    common = described(ContextParallel())
    assert common.slot_mapping.tolist() == [15, 18, 4]
    assert common.dcp_local_seq_lens is None


def test_blocks() -> None:
    assert blocks_per_rank(9, 4, ContextParallel()) == 3
    assert blocks_per_rank(9, 4, Place()) == 2
    assert blocks_per_rank(9, 4, Place(interleave=4)) == 2
    assert blocks_per_rank(0, 4, Place()) == 0


@pytest.mark.parametrize(
    ("seq_len", "block_size", "words"),
    [
        (100, 0, "block_size=0 is not allowed; allowed: an int >= 1"),
        (100, -16, "block_size=-16"),
        (-5, 16, "seq_len=-5"),
        (1.5, 16, r"seq_len=1\.5"),
    ],
)
def test_blocks_of_what_is_no_count(seq_len: Any, block_size: int, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        blocks_per_rank(seq_len, block_size, Place())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"seq_lens": [13, 3]}, r"seq_lens\[0\] is 13; allowed: of which rank 0 holds 13 tokens"),
        ({"seq_lens": [1, 3]}, r"seq_lens\[0\] is 1; allowed: at least query_lens\[0\] = 2"),
        ({"seq_lens": [5]}, "of 2, 1 and 2 requests; allowed: one number of requests"),
        ({"block_size": 0}, "block_size is 0; allowed: an integer >= 1"),
        ({"block_size": 2.0}, r"block_size is 2\.0; allowed: an integer >= 1"),
        ({"block_table": torch.zeros(2)}, r"block_table is of torch.float32 \(2,\); allowed: a t"),
        ({"block_table": [[0], [1]]}, r"block_table is a list; allowed: a tensor \(B, M\)"),
        ({"block_table": torch.zeros(2, 9)}, "block_table is of torch.float32"),
        ({"seq_lens": 5}, "seq_lens is a int; allowed: a list of ints"),
        ({"seq_lens": "55"}, "seq_lens is a str; allowed: a list of ints"),
        ({"seq_lens": [5.5, 3]}, r"seq_lens\[0\] is 5\.5; allowed: an int"),
        ({"query_lens": [True, 1]}, r"query_lens\[0\] is True; allowed: an int"),
        ({"place": None}, "place is None; allowed: a ContextParallel"),
        ({"place": Place(interleave=4)}, "block_size is 2; allowed: a multiple of interleave=4"),
    ],
)
def test_refuses(options: dict[str, Any], words: str) -> None:
    with pytest.raises(MetadataError, match=words):
        described(options.pop("place", ContextParallel()), **options)
