"""Sums over many keys stay as accurate as those of a matrix product, on every instruction set."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attn_cpu_testing import attention_arguments, levels, needs_kernels, plan_of, run
from torch import Tensor

from attn_cpu.isa import IsaLevel
from attn_shared.accuracy import eager_attention
from attn_shared.reference import AttentionOptions, paged_attention

pytestmark = needs_kernels

KEYS, HEADS, KV_HEADS, SIZE, BLOCK = 16384, 4, 2, 32, 128


def _long_arguments(queries: int) -> dict[str, Any]:
    """Return a call of one request, whose last tokens see up to KEYS keys."""
    generator = torch.Generator().manual_seed(0)
    blocks = KEYS // BLOCK
    shape = (blocks, BLOCK, KV_HEADS, SIZE)
    arguments = attention_arguments(
        query=torch.randn(queries, HEADS, SIZE, generator=generator),
        out=torch.zeros(queries, HEADS, SIZE),
        lse=torch.zeros(HEADS, queries),
        key=torch.randn(shape, generator=generator),
        value=torch.randn(shape, generator=generator),
        block_table=torch.randperm(blocks, generator=generator).int().unsqueeze(0),
        query_start_loc=torch.tensor([0, queries], dtype=torch.int32),
        seq_lens=torch.tensor([KEYS], dtype=torch.int32),
    )
    return arguments | {"plan": plan_of(arguments, num_threads=1)}


def _error(got: Tensor, exact: Tensor) -> float:
    """Return |got - exact| / |exact|, Euclidean norms over all elements."""
    return float((got.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("queries", [1, 40], ids=["split", "whole"])
def test_errs_no_more_than_twice_eager(queries: int) -> None:
    """40 queries of two heads each are more rows than a split takes: one sum runs over all keys."""
    arguments = _long_arguments(queries)
    names = ("query_start_loc", "seq_lens", "block_table")
    batch = {name: arguments[name] for name in names}
    inputs = (arguments["query"], arguments["key"], arguments["value"])
    options = AttentionOptions(scale=SIZE**-0.5)
    exact = paged_attention(*inputs, options, **batch).output
    eager = eager_attention(*inputs, options, **batch, compute_dtype=torch.float32).output
    allowed = 2 * _error(eager, exact)
    errors = {
        level: _error(run(arguments | {"isa": int(IsaLevel[level.upper()])}), exact)
        for level in levels()
    }
    assert {level: error for level, error in errors.items() if error > allowed} == {}
