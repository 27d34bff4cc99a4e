"""examples/mini_engine.py: what it generates, shares and gives back."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from attn_shared import CommonAttentionMetadata

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@pytest.fixture(scope="module")
def example() -> Iterator[Any]:
    sys.path.insert(0, str(EXAMPLES))
    try:
        yield importlib.import_module("mini_engine")
    finally:
        sys.path.remove(str(EXAMPLES))
        for name in ("mini_engine", "mini_model"):
            sys.modules.pop(name, None)


@pytest.fixture
def model(example: Any) -> Any:
    torch.manual_seed(3)
    return example.Model()


def alone(model: Any, prompt: list[int], count: int) -> list[int]:
    """Generate greedily, computing the whole sequence anew for each token."""
    tokens = list(prompt)
    for _ in range(count):
        blocks = -(-len(tokens) // model.block_size)
        common = CommonAttentionMetadata.from_lengths(
            query_lens=[len(tokens)],
            seq_lens=[len(tokens)],
            block_table=torch.arange(blocks)[None],
            block_size=model.block_size,
        )
        caches = [layer.allocate(blocks) for layer in model.layers]
        tokens.append(int(model(torch.tensor(tokens), caches, common)[-1].argmax()))
    return tokens[len(prompt) :]


def answered(engine: Any, *requests: Any) -> list[list[int]]:
    steps = 0
    while engine.running or engine.waiting:
        engine.step()
        steps += 1
        assert steps < 1000
    return [request.tokens for request in requests]


def test_a_crowd_gets_what_each_would_get_alone(example: Any, model: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    prompts = [
        torch.randint(97, (length,), generator=generator).tolist() for length in (1, 16, 17, 90, 5)
    ]
    engine = example.Engine(model, num_blocks=40)
    requests = [engine.add(prompt, max_new=6) for prompt in prompts]
    for prompt, tokens in zip(prompts, answered(engine, *requests), strict=True):
        assert tokens == prompt + alone(model, prompt, 6)


def test_a_common_beginning_is_computed_once(example: Any, model: Any) -> None:
    prefix = list(range(40))
    engine = example.Engine(model, num_blocks=12)
    first = engine.add([*prefix, 50], max_new=4)
    answered(engine)
    second, third = engine.add([*prefix, 60], max_new=4), engine.add(prefix[:32], max_new=4)
    answered(engine)
    assert (first.shared, second.shared) == (0, 32)
    assert third.shared == 16  # the last token has to be fed, so that its block is its own
    assert second.blocks[:2] == first.blocks[:2]
    assert second.blocks[2] != first.blocks[2]
    for request, prompt in ((second, [*prefix, 60]), (third, prefix[:32])):
        assert request.tokens == prompt + alone(model, prompt, 4)


def test_requests_that_do_not_fit_wait_and_blocks_come_back(example: Any, model: Any) -> None:
    engine = example.Engine(model, num_blocks=4)
    prompts = [[7] * 40, [8] * 40, [9] * 3]
    requests = [engine.add(prompt, max_new=5) for prompt in prompts]
    engine.step()
    assert len(engine.running) == 1
    assert len(engine.waiting) == 2
    for prompt, tokens in zip(prompts, answered(engine, *requests), strict=True):
        assert tokens == prompt + alone(model, prompt, 5)
    assert len(engine.pool.idle) == 4
    assert not any(engine.pool.readers)


def test_a_block_that_was_overwritten_is_not_found(example: Any, model: Any) -> None:
    engine = example.Engine(model, num_blocks=3)
    first = engine.add([7] * 33, max_new=2)
    answered(engine)
    answered(engine, engine.add([8] * 40, max_new=2))
    again = engine.add([7] * 33, max_new=2)
    (tokens,) = answered(engine, again)
    assert again.shared == 0
    assert tokens == first.tokens


@pytest.mark.parametrize(("prompt", "max_new"), [([], 1), ([1], 0), ([1] * 60, 5)])
def test_what_could_never_run_is_refused(
    example: Any, model: Any, prompt: list[int], max_new: int
) -> None:
    with pytest.raises(ValueError, match="tokens"):
        example.Engine(model, num_blocks=4).add(prompt, max_new)


def test_it_runs_as_a_script(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    example.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5
    assert " 32 shared" in lines[2]


def test_it_is_as_short_as_it_says() -> None:
    assert len((EXAMPLES / "mini_engine.py").read_text(encoding="utf-8").splitlines()) < 150
