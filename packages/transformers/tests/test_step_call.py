"""What the first layer of a pass finds out serves the others, but no call that differs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hf_testing import logits, paged, tiny, token_ids

from attn_shared.errors import InvalidInputError, UnsupportedOptionError
from attn_shared.selection import Policy
from attn_transformers import PagedCache
from attn_transformers.attention import AttentionFunction
from attn_transformers.layers import LayerKey
from attn_transformers.masks import attention_mask

HEADS, KV_HEADS, SIZE = 6, 2, 8


class Pass:
    """Layers that attend in one pass over one cache, as a model calls them."""

    def __init__(self, cache: PagedCache, start: int, count: int) -> None:
        self.cache, self.count = cache, count
        self.attend = AttentionFunction(policy=Policy())
        self.mask = attention_mask(1, count, start + count, q_offset=start)

    def states(self, layer: int, seed: int = 0) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(100 * layer + seed)
        heads = (HEADS, KV_HEADS, KV_HEADS)
        return [torch.randn(1, n, self.count, SIZE, generator=generator) for n in heads]

    def layer(self, layer: int, seed: int = 0, **arguments: Any) -> torch.Tensor:
        query, key, value = self.states(layer, seed)
        key, value = self.cache.update(key, value, layer)
        module = torch.nn.Module()
        return self.attend(module, query, key, value, self.mask, **arguments)[0]


@pytest.fixture
def keys_made(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Count the calls that find out what kind a layer is."""
    made: list[None] = []
    original = AttentionFunction._key_of

    def counted(*args: Any) -> LayerKey:
        made.append(None)
        return original(*args)

    monkeypatch.setattr(AttentionFunction, "_key_of", counted)
    return made


def test_one_layer_of_a_kind_finds_out_per_pass(keys_made: list[None]) -> None:
    model, cache = tiny("llama"), paged()
    tokens = token_ids(2, 9)
    logits(model, "attn", tokens[:, :7], cache=cache)
    assert len(keys_made) == 1  # of two layers
    for position in (7, 8):
        found = logits(model, "attn", tokens[:, position : position + 1], cache=cache)
    assert len(keys_made) == 3
    expected = logits(model, "eager", tokens)[:, -1:]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_kinds_of_layers_find_out_for_themselves(keys_made: list[None]) -> None:
    logits(tiny("gemma2"), "attn", token_ids(1, 9), cache=paged())
    assert len(keys_made) == 2


@pytest.mark.parametrize("count", [3, 1])
@pytest.mark.parametrize(
    "arguments", [{"scaling": 0.7}, {"softcap": 1.5}, {"s_aux": torch.arange(6.0)}]
)
def test_a_layer_with_other_arguments_is_answered_by_them(
    count: int, arguments: dict[str, Any]
) -> None:
    found = Pass(paged(), 0, count)
    found.layer(0)
    alone = Pass(paged(), 0, count)
    assert torch.equal(found.layer(1, **arguments), alone.layer(1, **arguments))
    assert not torch.equal(Pass(paged(), 0, count).layer(1), alone.layer(2))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"dropout": 0.1}, "dropout=0.1"),
        ({"head_mask": torch.ones(6)}, "head_mask"),
        ({"sliding_window": 3}, "sliding_window=3 contradicts"),
        ({"is_causal": False}, "is_causal=False contradicts"),
    ],
)
def test_later_layers_are_refused_what_the_first_is(arguments: dict[str, Any], words: str) -> None:
    step = Pass(paged(), 0, 3)
    step.layer(0)
    with pytest.raises(UnsupportedOptionError, match=words):
        step.layer(1, **arguments)


def test_gradients_and_compilation_are_refused_in_later_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = Pass(paged(), 0, 3)
    step.layer(0)
    query, key, value = step.states(1)
    key, value = step.cache.update(key, value, 1)
    with pytest.raises(UnsupportedOptionError, match="no_grad"):
        step.attend(torch.nn.Module(), query.requires_grad_(), key, value, step.mask)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(UnsupportedOptionError, match="being compiled"):
        step.attend(torch.nn.Module(), query.detach(), key, value, step.mask)


def test_shapes_that_differ_from_the_first_layers_are_looked_at() -> None:
    step = Pass(paged(), 0, 3)
    step.layer(0)
    query, key, value = step.states(1)
    key, value = step.cache.update(key, value, 1)
    with pytest.raises(InvalidInputError, match=r"\(2, 3\); allowed: \(3, 3\)"):
        step.attend(torch.nn.Module(), query[:, :, 1:], key, value, step.mask)


def test_a_pass_fed_again_after_cropping_is_planned_anew() -> None:
    cache = paged()
    first = Pass(cache, 0, 5)
    for layer in (0, 1):
        first.layer(layer)
    again = Pass(cache, 5, 1)
    expected = [again.layer(layer) for layer in (0, 1)]
    cache.crop(-1)
    found = [again.layer(layer) for layer in (0, 1)]  # the very mask of the pass that was cropped
    assert all(map(torch.equal, found, expected))
    assert cache.usage().used_blocks == 2


def test_two_caches_under_one_mask_keep_their_own() -> None:
    step = Pass(paged(), 0, 3)
    first = step.layer(0)
    step.cache = paged()
    assert torch.equal(step.layer(0), first)
    assert step.cache.get_seq_length() == 3
    assert step.cache.usage().used_blocks == 1
