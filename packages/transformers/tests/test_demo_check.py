"""Comparing two runs, and what a run records."""

from __future__ import annotations

import pytest
import torch
from hf_testing import padding_mask, tiny, token_ids

from attn_transformers import PagedCache
from attn_transformers.demo_check import Difference, Run, compare, generate_greedily


def run(*tokens: list[int], gap: float = 1.0) -> Run:
    return Run(
        tokens=tuple(map(tuple, tokens)),
        gaps=tuple((gap,) * len(row) for row in tokens),
        prefill_s=0.5,
        decode_s=2.0,
    )


def test_equal_runs() -> None:
    check = compare(run([1, 2], [3, 4]), run([1, 2], [3, 4], gap=2.0))
    assert check.is_equal
    assert check.num_tokens == 4


def test_the_first_difference_is_the_earliest_step_of_any_row() -> None:
    check = compare(run([1, 2, 9], [3, 4, 5]), run([1, 2, 8], [3, 7, 5], gap=2.0))
    assert not check.is_equal
    assert check.difference == Difference(row=1, step=1, tokens=(4, 7), gaps=(1.0, 2.0))


def test_a_run_that_ends_early_differs() -> None:
    check = compare(run([1, 2]), run([1, 2, 3]))
    assert check.difference == Difference(row=0, step=2, tokens=(-1, 3), gaps=(0.0, 1.0))


@pytest.mark.parametrize(("tokens", "expected"), [([1], None), ([1, 2, 3, 4, 5], 2.0)])
def test_speed_counts_the_steps_after_the_first(tokens: list[int], expected: float | None) -> None:
    assert run(tokens).tokens_per_s == expected


def test_generating_records_tokens_gaps_and_progress() -> None:
    model, told = tiny("llama"), []
    model.set_attn_implementation("attn")
    ids, mask = token_ids(2, 5), padding_mask(5, 3, 5)
    found = generate_greedily(
        model,
        {"input_ids": ids, "attention_mask": mask},
        4,
        PagedCache(),
        lambda what, done, total: told.append((done, total)),
    )
    assert told == [(0, 4), (1, 4), (2, 4), (3, 4), (4, 4)]
    assert found.num_steps == 4
    model.set_attn_implementation("eager")
    with torch.no_grad():
        logits = model(ids, attention_mask=mask).logits[:, -1]
    best = logits.topk(2)
    assert [row[0] for row in found.tokens] == best.indices[:, 0].tolist()
    expected = (best.values[:, 0] - best.values[:, 1]).tolist()
    assert [row[0] for row in found.gaps] == pytest.approx(expected, rel=1e-3)
    assert found.tokens_per_s is not None
    assert found.tokens_per_s > 0
