"""Top-p over a large vocabulary on a CPU: few tokens are put in order where few are enough."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from sampling_testing import FLOAT32, exact_rows, sampler_of

from attn_shared.sampling import SamplingParams, nucleus

SAMPLER = sampler_of("TORCH")
SIZE = 6000


def logits_of_many_kinds() -> torch.Tensor:
    """Return (8, V): peaked, flat, tied at the last candidate, all equal, forbidden, broken."""
    generator = torch.Generator().manual_seed(3)
    noise = torch.randn(8, SIZE, generator=generator)
    rows = noise.clone()
    rows[0, :50] += 9
    rows[2, :] = -3.0
    rows[2, torch.randperm(SIZE, generator=generator)[:3000]] = (
        1.0  # ties reach past the candidates
    )
    rows[3] = 0.5
    rows[4, 100:] = -math.inf
    rows[5, 7] = math.nan
    rows[6] *= 4
    rows[7, nucleus._CANDIDATES :] = -20.0
    return rows


ASKED: dict[str, list[Any]] = {
    "top_p": [0.9, 0.95, 0.5, 0.3, 0.99, 0.9, 1.0, 0.9999],
    "temperature": [1.0, 0.9, 1.0, 2.0, 1.0, 1.0, 0.7, 1.0],
}


def sample(logits: torch.Tensor, **asked: Any) -> Any:
    params = SamplingParams(seeds=list(range(len(logits))), steps=1, **asked)
    return SAMPLER.sample(logits, params, returns="processed_logits")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_candidates_keep_what_the_rule_keeps(dtype: torch.dtype) -> None:
    logits = logits_of_many_kinds().to(dtype)
    found = sample(logits, **ASKED)
    checked = 0
    for row, exact in enumerate(exact_rows(logits.float(), ASKED)):
        assert bool(found.valid[row]) is exact.valid
        if exact.valid and exact.margin > FLOAT32:
            assert (found.logits[row] > -math.inf).tolist() == list(exact.kept)
            checked += 1
    assert checked >= 6


@pytest.mark.parametrize("asked", [ASKED, {"top_p": 0.9}, {"top_p": 0.9, "temperature": 0.3}])
def test_how_many_are_put_in_order_makes_no_difference(
    asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = logits_of_many_kinds()
    few = sample(logits, **asked)
    monkeypatch.setattr(nucleus, "_CANDIDATES", SIZE)
    every = sample(logits, **asked)
    assert torch.equal(few.ids, every.ids)
    assert torch.equal(few.logits[few.valid], every.logits[every.valid])


def test_a_row_alone_is_the_row_in_its_batch() -> None:
    logits = logits_of_many_kinds()
    together = sample(logits, **ASKED)
    for row in range(len(logits)):
        own = {name: values[row] for name, values in ASKED.items()}
        params = SamplingParams(seeds=row, steps=1, **own)
        alone = SAMPLER.sample(logits[row : row + 1], params, returns="processed_logits")
        assert alone.ids.item() == together.ids[row].item()
        if together.valid[row]:
            assert alone.logits is not None
            assert torch.equal(alone.logits[0], together.logits[row])
