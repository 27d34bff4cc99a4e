"""Greedy tokens in float32 are those of transformers' own eager attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hf_testing import greedy, logits, padding_mask, paged, tiny, token_ids

from attn_shared.errors import UnsupportedOptionError
from attn_transformers import PagedCache

DECODERS = ("llama", "mistral", "gemma2", "gpt_oss", "gemma4", "lfm2")
PROMPTS = token_ids(3, 9)
LEFT = padding_mask(9, 5, 9, 2)
RIGHT = padding_mask(9, 5, 9, 2, side="right")


def cache_of(kind: str, model: Any) -> PagedCache | None:
    return paged(config=model.config) if kind == "paged" else None


@pytest.mark.parametrize("kind", ["stock", "paged"])
@pytest.mark.parametrize("name", DECODERS)
def test_a_left_padded_batch(name: str, kind: str) -> None:
    model = tiny(name)
    expected = greedy(model, "eager", PROMPTS, LEFT)
    assert torch.equal(greedy(model, "attn", PROMPTS, LEFT, cache_of(kind, model)), expected)


@pytest.mark.parametrize("kind", ["stock", "paged"])
@pytest.mark.parametrize("backend", ["TORCH_SDPA", "FLEX_ATTENTION"])
@pytest.mark.parametrize("name", ["llama", "gpt_oss", "gemma2"])
def test_named_backends(name: str, backend: str, kind: str) -> None:
    model = tiny(name)
    expected = greedy(model, "eager", PROMPTS, LEFT, max_new_tokens=6)
    cache = cache_of(kind, model)
    found = greedy(model, f"attn:{backend}", PROMPTS, LEFT, cache, max_new_tokens=6)
    assert torch.equal(found, expected)
    assert cache is None or {s.chosen for s in cache.selections()} == {backend}


@pytest.mark.parametrize("kind", ["stock", "paged"])
@pytest.mark.parametrize("batch_size", [1, 2, 3])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_batches_without_padding(name: str, batch_size: int, kind: str) -> None:
    model, prompts = tiny(name), token_ids(batch_size, 7, seed=batch_size)
    expected = greedy(model, "eager", prompts)
    assert torch.equal(greedy(model, "attn", prompts, None, cache_of(kind, model)), expected)


@pytest.mark.parametrize("kind", ["stock", "paged"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_real_places_of_a_right_padded_batch(name: str, kind: str) -> None:
    model = tiny(name)
    options = {} if kind == "stock" else {"cache": paged()}
    expected = logits(model, "eager", PROMPTS, attention_mask=RIGHT)
    found = logits(model, "attn", PROMPTS, attention_mask=RIGHT, **options)
    torch.testing.assert_close(found[RIGHT.bool()], expected[RIGHT.bool()], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["stock", "paged"])
def test_generation_after_padding_on_the_right(kind: str) -> None:
    # The first new token comes from a place of padding, and later ones follow a gap.
    model = tiny("llama")
    expected = greedy(model, "eager", PROMPTS, RIGHT)
    assert torch.equal(greedy(model, "attn", PROMPTS, RIGHT, cache_of(kind, model)), expected)


@pytest.mark.parametrize("kind", ["stock", "paged"])
def test_a_window_over_a_gap_is_refused(kind: str) -> None:
    model = tiny("mistral")
    with pytest.raises(UnsupportedOptionError, match=r"window of \(4, 0\).*pad on the left"):
        greedy(model, "attn", PROMPTS, RIGHT, cache_of(kind, model))


@pytest.mark.parametrize("kind", ["stock", "paged"])
@pytest.mark.parametrize("name", ["llama", "mistral", "lfm2"])
def test_beam_search(name: str, kind: str) -> None:
    model = tiny(name)
    options = {"num_beams": 3, "num_return_sequences": 2}
    expected = greedy(model, "eager", PROMPTS, LEFT, **options)
    found = greedy(model, "attn", PROMPTS, LEFT, cache_of(kind, model), **options)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("kind", ["stock", "paged"])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_prompt_in_chunks(name: str, kind: str) -> None:
    model = tiny(name)
    expected = greedy(model, "eager", PROMPTS, LEFT)
    cache = cache_of(kind, model)
    found = greedy(model, "attn", PROMPTS, LEFT, cache, prefill_chunk_size=4)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("kind", ["stock", "paged"])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_guesses_that_are_cropped_again(name: str, kind: str) -> None:
    model, prompt = tiny(name), torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 5, 6]])
    expected = greedy(model, "eager", prompt)
    cache = cache_of(kind, model)
    found = greedy(model, "attn", prompt, None, cache, prompt_lookup_num_tokens=3)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", ["llama", "mistral"])
@pytest.mark.parametrize("options", [{"cache_implementation": "static"}, {"use_cache": False}])
def test_other_caches_of_transformers(name: str, options: dict[str, Any]) -> None:
    model = tiny(name)
    expected = greedy(model, "eager", PROMPTS, LEFT)
    assert torch.equal(greedy(model, "attn", PROMPTS, LEFT, **options), expected)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_conversation_goes_on_in_the_same_cache(name: str) -> None:
    model, cache = tiny(name), paged()
    first = greedy(model, "attn", PROMPTS, LEFT, cache)
    turn = torch.cat((first, token_ids(3, 4, seed=1)), dim=1)
    mask = torch.cat((LEFT, torch.ones(3, turn.shape[1] - 9, dtype=torch.long)), dim=1)
    expected = greedy(model, "eager", turn, mask)
    assert torch.equal(greedy(model, "attn", turn, mask, cache), expected)


def test_a_decoder_without_causality() -> None:
    model = tiny("llama")
    expected = logits(model, "eager", PROMPTS, is_causal=False)
    for options in ({}, {"cache": paged()}):
        found = logits(model, "attn", PROMPTS, is_causal=False, **options)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_keys_and_values_of_different_widths() -> None:
    model = tiny("deepseek")
    expected = greedy(model, "eager", PROMPTS, LEFT)
    assert torch.equal(greedy(model, "attn", PROMPTS, LEFT), expected)


@pytest.mark.parametrize(
    ("name", "word"), [("llama4", "attention_chunk_size"), ("t5", "position_")]
)
def test_models_that_no_backend_is_asked_for(name: str, word: str) -> None:
    with pytest.raises(UnsupportedOptionError, match=word):
        greedy(tiny(name), "attn", PROMPTS)
