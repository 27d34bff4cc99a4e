"""The samplers of a GPU against the rule: TORCH, and FlashInfer's kernels where they compile.

python -m pytest shared/tests/test_sampling_on_gpu.py --room=cuda
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from sampling_testing import chi_square_limit, statistic

from attn_shared.errors import AttnError
from attn_shared.sampling import Sampler, SamplingParams
from attn_shared.sampling.reference import exact_row

pytestmark = pytest.mark.cuda

ROW = [2.0, 0.0, 1.0, 1.0, -1.0, 0.5, -math.inf, 1.5, 1.5, 0.25, -2.0, -0.5]
DRAWS = 60_000
ASKED: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.5},
    {"temperature": 0.0},
    {"top_k": 1},
    {"top_k": 3},
    {"top_k": 5},
    {"top_k": -1},
    {"top_p": 0.0},
    {"top_p": 1e-6},
    {"top_p": 0.6},
    {"top_p": 0.9},
    {"min_p": 0.3},
    {"top_k": 4, "top_p": 0.7, "temperature": 1.5},
    {"top_k": 6, "min_p": 0.35},
    {"top_k": 2**30, "top_p": 0.8},
)


@pytest.fixture(scope="module", params=["TORCH", "FLASHINFER"])
def sampler(request: pytest.FixtureRequest) -> Sampler:
    """A sampler that draws, or a skip with its library's own words."""
    try:
        made = Sampler("cuda", sampler=request.param)
        made.sample(torch.zeros(2, 1000, device="cuda"), SamplingParams(top_k=5, top_p=0.5))
    except AttnError as error:
        pytest.skip(f"{request.param} does not run here: {error.message[:200]}")
    return made


@contextmanager
def no_waiting() -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    try:
        with warnings.catch_warnings():  # the mode says that it is a prototype
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("asked", ASKED, ids=str)
def test_draws_follow_the_rules_distribution(
    sampler: Sampler, asked: dict[str, Any], dtype: torch.dtype
) -> None:
    logits = torch.tensor([ROW], device="cuda", dtype=dtype).expand(DRAWS, -1).contiguous()
    generator = torch.Generator("cuda").manual_seed(11)
    found = sampler.sample(logits, SamplingParams(generator=generator, **asked))
    exact = exact_row(ROW, **asked)
    assert bool(found.valid.all())
    degrees = max(1, sum(exact.kept) - 1)
    assert statistic(found.ids, exact.probabilities) < chi_square_limit(degrees)


@pytest.mark.parametrize("vocabulary", [32_000, 100_003])
def test_no_id_is_drawn_that_the_rule_forbids(sampler: Sampler, vocabulary: int) -> None:
    generator = torch.Generator("cuda").manual_seed(vocabulary)
    rows = torch.randn(8, vocabulary, generator=generator, device="cuda") * 3
    rows[3] = rows[3].bfloat16().float()  # ties
    rows[4] = (rows[4] * 2).round()  # many
    rows[5, ::2] = -math.inf
    asked: dict[str, list[Any]] = {
        "top_k": [1, 5, 50, 50, 7, 0, 2**30, 1000],
        "top_p": [1.0, 0.9, 0.5, 0.95, 0.99, 0.3, 0.8, 0.999],
        "temperature": [1.0, 0.7, 1.0, 1.0, 1.0, 1.3, 1.0, 0.0],
    }
    draws = 200
    spread: dict[str, Any] = {
        name: torch.tensor(values, device="cuda").repeat_interleave(draws)
        for name, values in asked.items()
    }
    ids = sampler.sample(rows.repeat_interleave(draws, 0), SamplingParams(**spread)).ids
    for index, drawn in enumerate(ids.view(-1, draws).tolist()):
        exact = exact_row(
            rows[index].double().tolist(), **{name: v[index] for name, v in asked.items()}
        )
        if exact.margin > 1e-4:
            assert all(exact.kept[token] for token in drawn), index


@pytest.mark.parametrize(
    "asked", [{}, {"top_k": 5}, {"top_p": 0.5}, {"top_k": 9, "top_p": 0.5}, {"min_p": 0.1}], ids=str
)
def test_a_row_without_a_distribution_harms_no_other(
    sampler: Sampler, asked: dict[str, Any]
) -> None:
    logits = torch.randn(9, 32_000, device="cuda")
    logits[0], logits[1, 77], logits[2], logits[3, 5] = math.nan, math.nan, -math.inf, math.inf
    found = sampler.sample(logits, SamplingParams(**asked))
    assert found.valid.tolist() == [False] * 4 + [True] * 5
    assert found.ids[:4].tolist() == [0] * 4
    assert 0 <= int(found.ids.min()) <= int(found.ids.max()) < 32_000


def test_numbers_on_the_device_are_not_waited_for(sampler: Sampler) -> None:
    logits = torch.randn(8, 32_000, device="cuda")
    top_k = torch.full((8,), 40, device="cuda")
    top_p = torch.full((8,), 0.9, device="cuda")
    params = SamplingParams(top_k=top_k, top_p=top_p)
    sampler.sample(logits, params)
    torch.cuda.synchronize()
    with no_waiting():
        sampler.sample(logits, params)


def test_the_native_path_does_not_depend_on_the_batch_and_replays() -> None:
    native = Sampler("cuda", sampler="TORCH")
    logits = torch.randn(64, 32_000, device="cuda")
    seeds, steps = (
        torch.arange(64, device="cuda"),
        torch.zeros(64, dtype=torch.int64, device="cuda"),
    )

    def drawn(first: int, last: int) -> Any:
        rows = slice(first, last)
        params = SamplingParams(
            top_k=50, top_p=0.9, temperature=0.8, seeds=seeds[rows], steps=steps[rows]
        )
        return native.sample(logits[rows], params, returns="processed_logits")

    whole = drawn(0, 64)
    for first, last in ((0, 1), (17, 18), (30, 61)):
        part = drawn(first, last)
        assert torch.equal(part.logits, whole.logits[first:last])
        assert torch.equal(part.ids, whole.ids[first:last])
    params = SamplingParams(top_k=steps + 40, top_p=0.9, seeds=seeds, steps=steps)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        native.sample(logits, params)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = native.sample(logits, params)
    for step in range(3):
        steps.fill_(step)
        logits.normal_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(captured.ids, native.sample(logits, params).ids)
