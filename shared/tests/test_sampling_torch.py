"""TORCH, the native path, against the rule in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sampling_testing import (
    FLOAT32,
    chi_square_limit,
    exact_rows,
    filters,
    logit_rows,
    sampler_of,
    statistic,
)

from attn_shared.sampling import Sampled, SamplingParams
from attn_shared.sampling.reference import exact_row

SAMPLER = sampler_of("TORCH")

LOGITS = torch.tensor([2.0, 0.0, 1.0, 1.0, -1.0, 0.5, -math.inf, 1.5])


def sample(logits: torch.Tensor, returns: str = "ids", **asked: Any) -> Sampled:
    return SAMPLER.sample(logits, SamplingParams(**asked), returns=returns)


@st.composite
def batches(draw: st.DrawFn) -> tuple[torch.Tensor, dict[str, list[Any]]]:
    logits = draw(logit_rows())
    return logits, draw(filters(len(logits)))


@given(batches(), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_masks_and_logprobs_are_the_rule(
    batch: tuple[torch.Tensor, dict[str, list[Any]]], dtype: torch.dtype
) -> None:
    logits, asked = batch
    found = sample(logits.to(dtype), "processed_logprobs", **asked)
    assert found.logprobs is not None
    for row, exact in enumerate(exact_rows(logits, asked)):
        assert bool(found.valid[row]) is exact.valid
        assert 0 <= int(found.ids[row]) < logits.shape[1]
        if not exact.valid or exact.margin < FLOAT32:
            continue
        probabilities = found.logprobs[row].exp().tolist()
        assert probabilities == pytest.approx(exact.probabilities, abs=1e-5)
        assert [p > 0 for p in probabilities] == list(exact.kept)
        assert exact.kept[int(found.ids[row])]


@given(batches(), st.randoms(use_true_random=False))
def test_a_row_does_not_depend_on_its_batch(
    batch: tuple[torch.Tensor, dict[str, list[Any]]], order: Any
) -> None:
    logits, asked = batch
    count = len(logits)
    own = {"seeds": [order.getrandbits(64) for _ in range(count)], "steps": list(range(count))}
    together = sample(logits, "processed_logits", **asked, **own)
    places = list(range(count)) * 2
    order.shuffle(places)
    mixed = {name: [values[place] for place in places] for name, values in (asked | own).items()}
    again = sample(logits[places], "processed_logits", **mixed)
    assert together.logits is not None
    assert again.logits is not None
    assert torch.equal(again.logits, together.logits[places])
    assert torch.equal(again.ids, together.ids[places])
    for row in range(count):
        alone = {name: [values[row]] for name, values in (asked | own).items()}
        assert int(sample(logits[row : row + 1], **alone).ids) == int(together.ids[row])


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"top_k": 3},
        {"top_p": 0.8},
        {"min_p": 0.3},
        {"top_k": 4, "top_p": 0.7, "temperature": 1.5},
        {"temperature": 0.5, "min_p": 0.1, "top_k": 5},
    ],
)
def test_draws_follow_the_distribution(asked: dict[str, Any]) -> None:
    # Seeds 0 to 39999 at one step: a pure function, so that this never fails by chance.
    count = 40_000
    exact = exact_rows(LOGITS[None], {name: [value] for name, value in asked.items()})[0]
    found = sample(LOGITS.expand(count, -1), seeds=torch.arange(count), steps=3, **asked)
    degrees = sum(exact.kept) - 1
    assert statistic(found.ids, exact.probabilities) < chi_square_limit(degrees)
    assert degrees > 1


def test_steps_of_one_seed_follow_the_distribution_and_have_no_memory() -> None:
    count = 40_000
    found = sample(LOGITS.expand(count, -1), seeds=7, steps=torch.arange(count)).ids
    exact = exact_rows(LOGITS[None], {})[0].probabilities
    assert statistic(found, exact) < chi_square_limit(6)
    pairs = found[:-1] * len(LOGITS) + found[1:]
    joint = [first * second for first in exact for second in exact]
    assert statistic(pairs, joint) < chi_square_limit(48)


def test_draws_by_a_generator_follow_the_distribution() -> None:
    generator = torch.Generator().manual_seed(5)
    found = sample(LOGITS.expand(40_000, -1), generator=generator, top_k=3)
    exact = exact_rows(LOGITS[None], {"top_k": [3]})[0]
    assert statistic(found.ids, exact.probabilities) < chi_square_limit(3)


def test_each_generator_serves_its_row_wherever_that_lies() -> None:
    def drawn(rows: list[int]) -> list[int]:
        own = {place: torch.Generator().manual_seed(40 + row) for place, row in enumerate(rows)}
        logits = torch.zeros(len(rows), 1000)
        return [int(each) for each in sample(logits, generators=own).ids]

    alone = [drawn([row])[0] for row in range(4)]
    assert drawn([3, 1, 0, 2]) == [alone[row] for row in (3, 1, 0, 2)]
    assert len(set(alone)) == 4


def test_bad_rows_harm_no_other_row() -> None:
    good = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    bad = torch.full((4, 50), -math.inf)
    bad[0, 7], bad[1, 0], bad[2] = math.nan, math.inf, math.nan
    asked: dict[str, Any] = {"top_k": 5, "top_p": 0.9, "seeds": 1, "steps": 0}
    mixed = sample(torch.cat((bad, good)), "processed_logits", **asked)
    alone = sample(good, "processed_logits", **asked)
    assert mixed.valid.tolist() == [False] * 4 + [True] * 3
    assert mixed.ids[:4].tolist() == [0] * 4
    assert mixed.logits is not None
    assert alone.logits is not None
    assert torch.equal(mixed.logits[4:], alone.logits)
    assert torch.equal(mixed.ids[4:], alone.ids)


def test_numbers_in_tensors_are_read_where_they_are() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0]] * 5)
    found = sample(
        logits,
        "processed_logits",
        temperature=torch.tensor([1.0, 0.0, 1.0, 1.0, 2.0]),
        top_k=torch.tensor([2**30, 1, -1, 3, 0], dtype=torch.int32),
        top_p=torch.tensor([1.0, 1.0, 0.0, 0.97, 1.0]),
    )
    assert found.logits is not None
    assert (found.logits > -math.inf).tolist() == [
        [True] * 4,
        [False, True, False, False],
        [False, True, False, False],
        [False, True, True, True],
        [True] * 4,
    ]
    assert found.ids[1:3].tolist() == [1, 1]


def test_a_nan_among_the_numbers_spoils_its_row_alone() -> None:
    parts = torch.full((3,), 0.5)
    params = SamplingParams(top_p=parts)
    parts[1] = math.nan  # as in a tensor on a device, which is not looked into
    found = SAMPLER.sample(torch.zeros(3, 4), params)
    assert found.valid.tolist() == [True, False, True]
    assert int(found.ids[1]) == 0


def test_top_p_just_below_one_stays_in_the_vocabulary() -> None:
    logits = torch.zeros(64, 100_003)
    found = sample(logits, top_p=1 - 2**-40, seeds=torch.arange(64), steps=0)
    assert int(found.ids.max()) < 100_003
    assert found.valid.all()


def test_an_empty_batch_has_no_ids() -> None:
    assert sample(torch.zeros(0, 5), top_k=2, top_p=0.5).ids.shape == (0,)


def test_logits_are_not_modified() -> None:
    logits = torch.randn(4, 30, generator=torch.Generator().manual_seed(1))
    before = logits.clone()
    sample(logits, "processed_logits", temperature=0.5, top_k=3, top_p=0.5, min_p=0.1)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("returns", ["ids", "processed_logprobs"])
@pytest.mark.parametrize("temperature", [1e-320, 1e-45, 1e-39, 3e-38, 1e39, 1e300])
def test_temperatures_beyond_float32(temperature: float, returns: str) -> None:
    """As in float64: one token or a uniform draw, by one number, a sequence or a tensor."""
    logits = torch.tensor([[1.0, 5.0, -math.inf, 2.0], [4.0, -8.0, 4.0, -math.inf]])
    exact = [exact_row(row, temperature=temperature).probabilities for row in logits.tolist()]
    for asked in (
        temperature,
        [temperature, temperature * 1.5],
        torch.tensor([temperature, temperature], dtype=torch.float64),
    ):
        drawn = sampler_of().sample(logits, SamplingParams(temperature=asked), returns=returns)
        assert drawn.valid.all()
        for row, token in enumerate(drawn.ids.tolist()):
            assert exact[row][token] > 0
        if drawn.logprobs is not None:
            torch.testing.assert_close(drawn.logprobs.exp(), torch.tensor(exact))
