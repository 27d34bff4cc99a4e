"""Drawn sequences of passes over one cache: greedy tokens in float32 are those of stock eager."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from hf_testing import greedy, logits, padding_mask, paged, tiny, token_ids
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attn_shared.errors import InvalidInputError, UnsupportedOptionError
from attn_transformers import PagedCache
from attn_transformers.turns import Turn

WINDOWED = ("mistral", "gemma2", "gpt_oss", "gemma4")
NAMES = ("llama", *WINDOWED)
NEW_TOKENS = 7


@dataclass(frozen=True, kw_only=True)
class Run:
    """One call of generate; `lengths` are the real tokens of each row."""

    lengths: tuple[int, ...]
    width: int
    side: str
    seed: int
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def inputs(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        ids = token_ids(len(self.lengths), self.width, seed=self.seed)
        if set(self.lengths) == {self.width}:
            return ids, None
        return ids, padding_mask(self.width, *self.lengths, side=self.side)


def generated(name: str, run: Run, implementation: str, cache: PagedCache | None) -> torch.Tensor:
    options = dict(run.options)
    assistant = options.pop("assistant", None)
    if assistant is not None:
        options["assistant_model"] = tiny(assistant)
        options["assistant_model"].set_attn_implementation(implementation)
    ids, mask = run.inputs
    return greedy(
        tiny(name), implementation, ids, mask, cache, max_new_tokens=NEW_TOKENS, **options
    )


@cache
def expected(name: str, run: Run) -> torch.Tensor:
    return generated(name, run, "eager", None)


@st.composite
def runs(draw: st.DrawFn, name: str) -> Run:
    rows, width = draw(st.integers(1, 3)), draw(st.integers(2, 12))
    kind = draw(st.sampled_from(["greedy", "greedy", "beams", "guesses", "assisted"]))
    options: dict[str, Any] = {}
    side = "left"
    lengths = (width,) * rows
    if kind in ("guesses", "assisted"):
        lengths = (width,)
        if kind == "guesses":
            options["prompt_lookup_num_tokens"] = 3
        else:
            options["assistant"] = "llama"  # without a window: a guess of 0 is padding to it
    elif draw(st.booleans()):
        lengths = tuple(draw(st.integers(1, width)) for _ in range(rows))
        side = draw(st.sampled_from(["left", "right"])) if name == "llama" else "left"
    if kind == "beams":
        options["num_beams"] = 2
    return Run(
        lengths=lengths,
        width=width,
        side=side,
        seed=draw(st.integers(0, 3)),
        options=tuple(options.items()),
    )


@st.composite
def stories(draw: st.DrawFn) -> tuple[str, int, list[Run]]:
    name = draw(st.sampled_from(NAMES))
    return (
        name,
        draw(st.sampled_from([1, 4, 16])),
        draw(st.lists(runs(name), min_size=1, max_size=3)),
    )


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(story=stories())
def test_one_cache_serves_one_prompt_after_another(story: tuple[str, int, list[Run]]) -> None:
    name, block_size, prompts = story
    cache = PagedCache(tiny(name).config, block_size=block_size)
    for run in prompts:
        found = generated(name, run, "attn", cache)
        assert torch.equal(found, expected(name, run)), run
        cache.reset()
        assert cache.usage().used_blocks == 0


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), name=st.sampled_from(["llama", "gemma2", "gpt_oss"]))
def test_fed_cropped_chosen_and_fed_again(data: st.DataObject, name: str) -> None:
    model, cache = tiny(name), paged()
    if name != "llama":
        logits(model, "attn", token_ids(1, 1), cache=cache)
        cache.reset()
        for each in cache.layers:
            each.activate_past_recording()
    width = data.draw(st.integers(2, 9))
    tokens, mask = token_ids(2, width), padding_mask(width, data.draw(st.integers(1, width)), width)
    logits(model, "attn", tokens, cache=cache, attention_mask=mask)
    for turn in range(data.draw(st.integers(1, 4))):
        kind = data.draw(st.sampled_from(["crop", "order", "repeat", "choose"]))
        if kind == "crop":
            stop = data.draw(st.integers(1, tokens.shape[1]))
            cache.crop(stop - tokens.shape[1])
            tokens, mask = tokens[:, :stop], mask[:, :stop]
        elif kind == "repeat" and len(tokens) < 5:
            cache.batch_repeat_interleave(2)
            tokens, mask = tokens.repeat_interleave(2, 0), mask.repeat_interleave(2, 0)
        elif kind == "order":
            size = len(tokens)
            rows = torch.tensor(
                data.draw(st.lists(st.integers(0, size - 1), min_size=size, max_size=size))
            )
            cache.reorder_cache(rows)
            tokens, mask = tokens[rows], mask[rows]
        else:
            rows = torch.arange(data.draw(st.integers(1, len(tokens))))
            cache.batch_select_indices(rows)
            tokens, mask = tokens[rows], mask[rows]
        more = token_ids(len(tokens), data.draw(st.sampled_from([1, 1, 3])), seed=turn + 5)
        tokens = torch.cat((tokens, more), 1)
        mask = torch.cat((mask, torch.ones_like(more)), 1)
        found = logits(model, "attn", more, cache=cache, attention_mask=mask)
        wanted = logits(model, "eager", tokens, attention_mask=mask)[:, -more.shape[1] :]
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_two_models_with_caches_of_their_own_in_turn() -> None:
    names = ("llama", "gemma2")
    caches = {name: paged() for name in names}
    tokens = token_ids(1, 9)
    for start, stop in ((0, 5), (5, 6), (6, 7), (7, 9)):
        for name in names:
            found = logits(tiny(name), "attn", tokens[:, start:stop], cache=caches[name])
            wanted = logits(tiny(name), "eager", tokens[:, :stop])[:, start:]
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_a_cache_of_another_model_is_refused_or_served_by_its_own_rules() -> None:
    cache = paged()
    logits(tiny("llama"), "attn", token_ids(1, 5), cache=cache)
    with pytest.raises(UnsupportedOptionError, match="one model"):
        logits(tiny("gemma2"), "attn", token_ids(1, 1), cache=cache)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("place", ["attention", "mlp"])
def test_a_pass_that_failed_is_not_gone_on_with(
    name: str, failing: int, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, cache = tiny(name), paged()
    tokens = token_ids(1, 6)
    logits(model, "attn", tokens, cache=cache)
    layer = model.model.layers[failing]
    module = layer.mlp if place == "mlp" else layer.self_attn

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("out of something")

    with monkeypatch.context() as patch:
        patch.setattr(module, "forward", fail)
        with pytest.raises(RuntimeError, match="out of something"):
            logits(model, "attn", tokens[:, :1], cache=cache)
    is_whole = failing == 1 and place == "mlp"  # all layers have the token: as with any cache
    if failing == 0 and place == "attention":  # none has it
        found = logits(model, "attn", tokens[:, :1], cache=cache)
        wanted = logits(model, "eager", torch.cat((tokens, tokens[:, :1]), 1))[:, -1:]
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    elif not is_whole:
        with pytest.raises(InvalidInputError):
            logits(model, "attn", tokens[:, :1], cache=cache)
    cache.reset()
    found = logits(model, "attn", tokens, cache=cache)
    torch.testing.assert_close(found, logits(model, "eager", tokens), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "gemma2", "deepseek"])
@pytest.mark.parametrize("failing", [0, 1])
def test_a_call_that_failed_in_the_kernel_is_not_gone_on_with(
    name: str, failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, cache = tiny(name), paged()
    tokens = token_ids(1, 6)
    logits(model, "attn", tokens, cache=cache)
    method = "run_latents" if name == "deepseek" else "run"
    original: Callable[..., torch.Tensor] = getattr(Turn, method)
    calls: list[None] = []

    def fail(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(None)
        if len(calls) == failing + 1:
            raise RuntimeError("out of something")
        return original(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Turn, method, fail)
        with pytest.raises(RuntimeError, match="out of something"):
            logits(model, "attn", tokens[:, :1], cache=cache)
    with pytest.raises(UnsupportedOptionError, match=r"call cache\.reset\(\)"):
        logits(model, "attn", tokens[:, :1], cache=cache)
    for forbidden in (lambda: cache.crop(-1), lambda: cache.batch_repeat_interleave(2)):
        with pytest.raises(UnsupportedOptionError, match=r"call cache\.reset\(\)"):
            forbidden()
    cache.reset()
    found = logits(model, "attn", tokens, cache=cache)
    torch.testing.assert_close(found, logits(model, "eager", tokens), rtol=1e-4, atol=1e-4)


def test_gradients_are_refused_before_the_cache_is_changed() -> None:
    model, cache = tiny("llama"), paged()
    model.set_attn_implementation("attn")
    tokens = token_ids(1, 6)
    model.train()
    try:
        with pytest.raises(UnsupportedOptionError, match="requires a gradient"):
            model(tokens, cache=cache)
        model.activation_checkpointing_enable()
        with pytest.raises(UnsupportedOptionError, match="requires a gradient"):
            model(tokens)
    finally:
        model.activation_checkpointing_disable()
        model.eval()
    cache.reset()
    found = logits(model, "attn", tokens, cache=cache)
    torch.testing.assert_close(found, logits(model, "eager", tokens), rtol=1e-4, atol=1e-4)


def test_a_layer_that_is_skipped_for_a_pass_is_named() -> None:
    model, cache = tiny("llama"), paged()
    tokens = token_ids(1, 6)
    logits(model, "attn", tokens, cache=cache)
    layers = model.model.layers
    kept = torch.nn.ModuleList(layers[:1])
    model.model.layers = kept
    try:
        logits(model, "attn", tokens[:, :1], cache=cache)
    finally:
        model.model.layers = layers
    with pytest.raises(InvalidInputError, match="tokens in the cache is 6; allowed: 8"):
        logits(model, "attn", tokens[:, 1:2], cache=cache)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_several_threads_generate_at_once(name: str) -> None:
    model = tiny(name)
    prompts = [token_ids(2, 4 + index, seed=index) for index in range(6)]
    wanted = [greedy(model, "eager", ids) for ids in prompts]
    model.set_attn_implementation("attn")

    def run(ids: torch.Tensor) -> torch.Tensor:
        return model.generate(
            ids,
            cache=paged(),
            max_new_tokens=12,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )

    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(run, prompts * 3))
    assert all(map(torch.equal, found, wanted * 3))
