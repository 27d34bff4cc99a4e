"""DeepSeek's models over a paged cache of latents give transformers' own greedy tokens."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from hf_testing import greedy, logits, padding_mask, paged, tiny, token_ids

from attn_shared.errors import NoBackendError, UnsupportedOptionError
from attn_transformers.new_tokens import latest_note

MODELS = ("deepseek", "deepseek_v2")
PROMPTS = token_ids(3, 9)
LEFT = padding_mask(9, 5, 9, 2)
RIGHT = padding_mask(9, 5, 9, 2, side="right")


@pytest.mark.parametrize("mask", [None, LEFT, RIGHT], ids=["full", "left", "right"])
@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens(name: str, mask: torch.Tensor | None) -> None:
    model, cache = tiny(name), paged()
    expected = greedy(model, "eager", PROMPTS, mask)
    assert torch.equal(greedy(model, "attn:TORCH_MLA", PROMPTS, mask, cache), expected)
    (selection,) = cache.selections()
    assert selection.chosen == "TORCH_MLA"


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_of_the_backend_that_is_chosen(name: str) -> None:
    model = tiny(name)
    cache = paged(config=model.config)
    expected = greedy(model, "eager", PROMPTS, LEFT)
    assert torch.equal(greedy(model, "attn", PROMPTS, LEFT, cache), expected)
    (selection,) = cache.selections()
    assert selection.request.use_mla


@pytest.mark.parametrize("name", MODELS)
def test_the_cache_holds_one_latent_per_token(name: str) -> None:
    model, cache = tiny(name), paged()
    greedy(model, "attn:TORCH_MLA", PROMPTS, None, cache)
    config, usage = model.config, cache.usage()
    entry = (config.kv_lora_rank + config.qk_rope_head_dim) * 4 * config.num_hidden_layers
    assert usage.block_size == 4
    assert usage.peak_used_bytes == usage.peak_used_blocks * usage.block_size * entry


@pytest.mark.parametrize("name", MODELS)
def test_a_prompt_in_pieces(name: str) -> None:
    model, cache = tiny(name), paged()
    prompt = token_ids(2, 40)
    expected = logits(model, "eager", prompt)
    pieces = [
        logits(model, "attn", part, cache=cache)
        for part in (prompt[:, :13], prompt[:, 13:36], prompt[:, 36:37], prompt[:, 37:])
    ]
    torch.testing.assert_close(torch.cat(pieces, dim=1), expected, rtol=1e-3, atol=1e-3)


def test_beam_search() -> None:
    model = tiny("deepseek")
    expected = greedy(model, "eager", PROMPTS, LEFT, num_beams=3)
    assert torch.equal(greedy(model, "attn", PROMPTS, LEFT, paged(), num_beams=3), expected)


def test_an_fp8_cache_is_near() -> None:
    model = tiny("deepseek")
    expected = logits(model, "eager", PROMPTS)
    found = logits(model, "attn", PROMPTS, cache=paged(kv_cache_dtype="fp8"))
    assert not torch.equal(found, expected)
    likeness = torch.nn.functional.cosine_similarity(found, expected, dim=-1)
    assert likeness.median() > 0.99  # a token may be routed to another expert


def test_other_weights_are_used_from_the_next_pass_on() -> None:
    model = tiny("deepseek_v2")
    weight = model.model.layers[0].self_attn.kv_b_proj.weight
    before = logits(model, "attn", PROMPTS, cache=paged())
    saved = weight.detach().clone()
    try:
        with torch.no_grad():
            weight.mul_(0.5)
        expected = logits(model, "eager", PROMPTS)
        found = logits(model, "attn", PROMPTS, cache=paged())
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
        assert not torch.allclose(found, before)
    finally:
        with torch.no_grad():
            weight.copy_(saved)


# What is refused


def test_a_backend_for_ordinary_heads() -> None:
    with pytest.raises(NoBackendError, match="mla=True"):
        greedy(tiny("deepseek"), "attn:TORCH_SDPA", PROMPTS, None, paged())


def test_a_projection_with_a_bias() -> None:
    model = tiny("deepseek_v2")
    projection = model.model.layers[0].self_attn.kv_b_proj
    projection.bias = torch.nn.Parameter(torch.zeros(projection.out_features))
    try:
        with pytest.raises(UnsupportedOptionError, match="Linear with a bias"):
            logits(model, "attn", PROMPTS, cache=paged())
    finally:
        projection.bias = None


def test_latents_of_a_pass_that_failed_are_nobodys() -> None:
    model, cache = tiny("deepseek"), paged()

    def fail(module: Any, arguments: Any) -> None:
        raise RuntimeError("in the middle")

    handle = model.model.layers[0].self_attn.kv_b_proj.register_forward_pre_hook(fail)
    try:
        with pytest.raises(RuntimeError, match="in the middle"):
            logits(model, "attn", PROMPTS, cache=cache)
    finally:
        handle.remove()
    gc.collect()
    assert latest_note(0) is None
    with pytest.raises(UnsupportedOptionError, match=r"call cache.reset\(\)"):
        logits(model, "attn", PROMPTS, cache=cache)
    expected = logits(model, "eager", PROMPTS)
    torch.testing.assert_close(logits(model, "attn", PROMPTS), expected, rtol=1e-3, atol=1e-3)
