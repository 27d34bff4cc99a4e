from __future__ import annotations

from typing import Any

import pytest
import torch

from attn_shared._call_checks import check_block_size, check_call, check_scale
from attn_shared.errors import InvalidInputError, MetadataError
from attn_shared.kv_cache import FullAttentionSpec
from attn_shared.spec import LayerSpec

LAYER = LayerSpec(
    num_heads=4, num_kv_heads=2, head_size=16, head_size_v=8, scale=0.25, dtype=torch.float32
)
CACHE = FullAttentionSpec(
    block_size=64, num_kv_heads=2, head_size=16, head_size_v=8, dtype=torch.float32
)
QUERY = torch.zeros(6, 4, 16)


def call(query: Any = QUERY, output: Any = None, lse: Any = None, num_tokens: int = 6) -> None:
    check_call(LAYER, query, output, lse, num_tokens)


def test_takes_a_call_that_fits_and_padding_rows() -> None:
    call(output=torch.zeros(6, 4, 8), lse=torch.zeros(4, 6))
    call(num_tokens=4)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"query": QUERY.tolist()}, "query is a list; allowed: a tensor"),
        ({"query": None}, "query is a NoneType"),
        ({"query": QUERY.bfloat16()}, "query dtype is torch.bfloat16; allowed: torch.float32"),
        ({"query": QUERY.view(6, 64)}, r"query shape is \(6, 64\); allowed: \(T, 4, 16\)"),
        ({"num_tokens": 7}, "query rows is 6; allowed: at least 7"),
        ({"output": QUERY}, r"output shape is \(6, 4, 16\); allowed: \(6, 4, 8\)"),
        ({"output": torch.zeros(6, 4, 8).half()}, "output dtype is torch.float16"),
        ({"lse": torch.zeros(6, 4)}, r"lse shape is \(6, 4\); allowed: \(4, 6\)"),
        ({"lse": torch.zeros(4, 6).half()}, "lse dtype is torch.float16"),
    ],
)
def test_refuses_what_does_not_fit(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        call(**arguments)


def test_a_batch_of_other_blocks_than_the_cache_has_is_refused() -> None:
    check_block_size(64, CACHE)
    check_block_size(None, CACHE)
    check_block_size(16, None)
    with pytest.raises(MetadataError, match="block_size is 16; allowed: 64, that of the layer"):
        check_block_size(16, CACHE)


@pytest.mark.parametrize("scale", [1, 0.5, torch.tensor(2.0), torch.tensor([1.0, 3.0])])
def test_takes_a_scale(scale: Any) -> None:
    check_scale("k_scale", scale, 2)


@pytest.mark.parametrize(
    "scale",
    [0.0, -1.0, float("nan"), "1", True, [1.0, 1.0], torch.ones(3), torch.tensor([1.0, 0.0])],
)
def test_refuses_a_scale(scale: Any) -> None:
    with pytest.raises(InvalidInputError, match="k_scale"):
        check_scale("k_scale", scale, 2)
