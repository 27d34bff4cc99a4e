"""Requests of many rows beside short ones, drawn at random, on every instruction set."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attn_cpu_testing import levels, needs_kernels
from drawn_calls import alone, drawn, problems, together

from attn_cpu.isa import IsaLevel

pytestmark = needs_kernels

LEVELS = {level: int(IsaLevel[level.upper()]) for level in levels()}
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
CAPS = (1.0, 8.0, 30.0)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_right_within_the_budget(seed: int, dtype: torch.dtype) -> None:
    assert problems(drawn(seed, dtype), LEVELS) == {}


def _capped(seed: int, cap: float) -> dict[str, Any]:
    """Return a call whose logits pass a cap nowhere, here and there, or mostly."""
    return drawn(seed, torch.float32) | {"softcap": cap}


@pytest.mark.parametrize("seed", range(10, 13))
@pytest.mark.parametrize("cap", CAPS)
def test_right_under_a_cap(seed: int, cap: float) -> None:
    assert problems(_capped(seed, cap), LEVELS) == {}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("seed", range(4, 10))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_request_does_not_notice_the_others(seed: int, dtype: torch.dtype, level: str) -> None:
    """In batch-invariant mode, whatever shares its batch and its items."""
    _check_alone(drawn(seed, dtype), LEVELS[level])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("cap", CAPS)
def test_nor_under_a_cap(cap: float, level: str) -> None:
    _check_alone(_capped(13, cap), LEVELS[level])


def _check_alone(arguments: dict[str, Any], isa: int) -> None:
    whole = together(arguments, isa)
    assert whole.isfinite().all()
    for request in range(len(arguments["seq_lens"])):
        rows, own = alone(arguments, request, isa)
        assert torch.equal(own, whole[rows])
