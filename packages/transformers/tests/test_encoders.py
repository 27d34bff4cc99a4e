"""Attention without a cache: encoders, cross-attention, vision."""

from __future__ import annotations

import pytest
import torch
from hf_testing import greedy, padding_mask, paged, tiny, token_ids
from transformers import DynamicCache, EncoderDecoderCache

TOKENS = token_ids(3, 9)
MASKS = {
    "none": None,
    "left": padding_mask(9, 5, 9, 2),
    "right": padding_mask(9, 5, 9, 2, side="right"),
}


def hidden(
    name: str, implementation: str, *inputs: torch.Tensor, **options: object
) -> torch.Tensor:
    model = tiny(name)
    model.set_attn_implementation(implementation)
    with torch.inference_mode():
        return model(*inputs, **options).last_hidden_state


@pytest.mark.parametrize("backend", ["TORCH_SDPA", "FLEX_ATTENTION"])
@pytest.mark.parametrize("padding", MASKS)
def test_every_place_of_bert(padding: str, backend: str) -> None:
    mask = MASKS[padding]
    expected = hidden("bert", "eager", TOKENS, attention_mask=mask)
    found = hidden("bert", f"attn:{backend}", TOKENS, attention_mask=mask)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("padding", MASKS)
def test_real_places_under_a_window_to_both_sides(padding: str) -> None:
    mask = MASKS[padding]
    real = torch.ones_like(TOKENS).bool() if mask is None else mask.bool()
    expected = hidden("modernbert", "eager", TOKENS, attention_mask=mask)
    found = hidden("modernbert", "attn", TOKENS, attention_mask=mask)
    torch.testing.assert_close(found[real], expected[real], rtol=1e-4, atol=1e-4)


def test_vision_has_no_mask() -> None:
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    expected = hidden("vit", "eager", pixels)
    torch.testing.assert_close(hidden("vit", "attn", pixels), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("is_paged", [False, True])
def test_an_encoder_and_its_decoder(is_paged: bool, num_beams: int) -> None:
    model, mask = tiny("bart"), MASKS["right"]
    expected = greedy(model, "eager", TOKENS, mask, num_beams=num_beams)
    cache = EncoderDecoderCache(paged(), DynamicCache()) if is_paged else None
    found = greedy(model, "attn", TOKENS, mask, cache, num_beams=num_beams)
    assert torch.equal(found, expected)
