"""The paged cache: what it keeps, shares, gives back and refuses."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hf_testing import greedy, logits, padding_mask, paged, tiny, token_ids
from transformers import DeepseekV32Config

from attn_shared.errors import InvalidInputError, UnknownNameError, UnsupportedOptionError
from attn_transformers import PagedCache

PROMPTS = token_ids(2, 9)
LAYERS = 2
BLOCK_BYTES = 2 * 4 * 2 * 8 * 4  # K and V, 4 tokens, 2 kv heads of width 8, float32


def feed(model: Any, cache: PagedCache, input_ids: torch.Tensor, **inputs: Any) -> torch.Tensor:
    return logits(model, "attn", input_ids, cache=cache, **inputs)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_lengths_count_padding_and_blocks_do_not() -> None:
    model, cache = tiny("llama"), paged()
    assert (cache.get_seq_length(), cache.get_mask_sizes(3, 0)) == (0, (3, 0))
    feed(model, cache, PROMPTS, attention_mask=padding_mask(9, 4, 9))
    assert (cache.get_seq_length(), cache.get_mask_sizes(3, 0)) == (9, (12, 0))
    assert cache.usage().used_blocks == 1 + 3  # 4 tokens and 9, in blocks of 4


def test_memory_is_counted_over_all_layers() -> None:
    cache = paged()
    assert cache.usage().block_size is None
    feed(tiny("llama"), cache, PROMPTS)
    usage = cache.usage()
    assert (usage.block_size, usage.used_blocks, usage.peak_used_blocks) == (4, 6, 6)
    assert usage.peak_used_bytes == 6 * BLOCK_BYTES * LAYERS
    assert usage.allocated_bytes == 128 * BLOCK_BYTES * LAYERS


def test_growing_keeps_what_was_written() -> None:
    model, cache = tiny("llama"), paged(block_size=1)
    tokens = token_ids(2, 40)
    for start in range(0, 40, 5):
        found = feed(model, cache, tokens[:, start : start + 5])
    close(found, logits(model, "eager", tokens)[:, -5:])
    assert cache.usage().used_blocks == 80


def test_a_window_gives_back_the_blocks_that_have_left_it() -> None:
    model, cache = tiny("mistral"), paged()
    tokens = token_ids(1, 40)
    for start in range(0, 40, 4):
        found = feed(model, cache, tokens[:, start : start + 4])
    # A window of 5 keys and 4 new tokens span at most 3 blocks of 4.
    assert cache.usage().peak_used_blocks <= 3
    close(found, logits(model, "eager", tokens)[:, -4:])


def test_kinds_of_layers_have_pools_of_their_own() -> None:
    cache = paged()
    feed(tiny("gemma2"), cache, token_ids(1, 9))
    windows = {selection.request.window for selection in cache.selections()}
    assert windows == {(3, 0), (None, None)}


def test_a_limit_of_blocks() -> None:
    cache = paged(max_blocks=5)
    with pytest.raises(InvalidInputError, match=r"max_blocks=5.*more blocks"):
        feed(tiny("llama"), cache, PROMPTS)
    cache.reset()
    feed(tiny("llama"), cache, PROMPTS[:1])


def test_cropping_and_feeding_again() -> None:
    model, cache = tiny("llama"), paged()
    expected = logits(model, "eager", PROMPTS)
    feed(model, cache, PROMPTS)
    cache.crop(-3)
    assert cache.get_seq_length() == 6
    close(feed(model, cache, PROMPTS[:, 6:]), expected[:, 6:])


def test_cropping_padded_rows() -> None:
    model, cache, mask = tiny("llama"), paged(), padding_mask(9, 4, 9)
    expected = logits(model, "eager", PROMPTS, attention_mask=mask)
    feed(model, cache, PROMPTS, attention_mask=mask)
    cache.crop(-7)  # row 0 keeps nothing real
    found = feed(model, cache, PROMPTS[:, 2:], attention_mask=mask)
    close(found[mask[:, 2:].bool()], expected[:, 2:][mask[:, 2:].bool()])


@pytest.mark.parametrize("count", [1, -10])
def test_cropping_what_is_not_there(count: int) -> None:
    cache = paged()
    feed(tiny("llama"), cache, PROMPTS)
    with pytest.raises(InvalidInputError, match=f"tokens_to_remove is {count}.*-9 to 0"):
        cache.crop(count)


def test_cropping_into_a_window_needs_what_left_it() -> None:
    model, tokens = tiny("mistral"), token_ids(1, 20)
    forgetful, careful = paged(block_size=1), paged(block_size=1)
    for cache in (forgetful, careful):
        feed(model, cache, tokens[:, :1])
        if cache is careful:
            cache.activate_past_recording()
        for position in range(1, 20):
            feed(model, cache, tokens[:, position : position + 1])
    with pytest.raises(UnsupportedOptionError, match="activate_past_recording"):
        forgetful.crop(-8)
    careful.crop(-8)
    close(feed(model, careful, tokens[:, 12:]), logits(model, "eager", tokens)[:, 12:])


def test_a_refused_crop_changes_nothing() -> None:
    model, cache = tiny("gemma2"), paged(block_size=1)
    tokens = token_ids(1, 20)
    for position in range(19):
        feed(model, cache, tokens[:, position : position + 1])
    with pytest.raises(UnsupportedOptionError):
        cache.crop(-8)
    assert cache.get_seq_length() == 19
    close(feed(model, cache, tokens[:, 19:]), logits(model, "eager", tokens)[:, 19:])


def test_resetting() -> None:
    model, cache = tiny("llama"), paged()
    feed(model, cache, PROMPTS)
    cache.reset()
    assert (cache.get_seq_length(), cache.usage().used_blocks) == (0, 0)
    other = token_ids(3, 5, seed=1)  # another batch size
    close(feed(model, cache, other), logits(model, "eager", other))


def test_repeated_rows_share_full_blocks() -> None:
    model, cache = tiny("llama"), paged()
    feed(model, cache, PROMPTS)
    cache.batch_repeat_interleave(3)
    assert cache.usage().used_blocks == 2 * (2 + 3)  # two full blocks, three partial ones each
    tokens = torch.cat((PROMPTS.repeat_interleave(3, 0), token_ids(6, 2, seed=1)), dim=1)
    close(feed(model, cache, tokens[:, 9:]), logits(model, "eager", tokens)[:, 9:])


@pytest.mark.parametrize("indices", [torch.tensor([1]), torch.tensor([False, True])])
def test_choosing_rows(indices: torch.Tensor) -> None:
    model, cache = tiny("llama"), paged()
    feed(model, cache, PROMPTS)
    cache.batch_select_indices(indices)
    tokens = torch.cat((PROMPTS[1:], token_ids(1, 2, seed=1)), dim=1)
    close(feed(model, cache, tokens[:, 9:]), logits(model, "eager", tokens)[:, 9:])
    assert cache.usage().used_blocks == 3


def test_a_copy_goes_its_own_way() -> None:
    model, cache = tiny("llama"), paged()
    feed(model, cache, PROMPTS)
    twin = copy.deepcopy(cache)
    ends = token_ids(2, 3, seed=1), token_ids(2, 3, seed=2)
    for each, end in zip((cache, twin), ends, strict=True):
        tokens = torch.cat((PROMPTS, end), dim=1)
        close(feed(model, each, end), logits(model, "eager", tokens)[:, 9:])


@pytest.mark.parametrize(("name", "error"), [("int8_per_token_head", 1.0), ("bfloat16", 0.5)])
def test_a_cache_of_another_format_is_near(name: str, error: float) -> None:
    model, cache = tiny("llama"), paged(kv_cache_dtype=name)
    expected = logits(model, "eager", PROMPTS)
    assert cache.kv_cache_dtype == name
    found = feed(model, cache, PROMPTS)
    assert cache.selections()[0].request.kv_cache_dtype == name
    assert 0 < (found - expected).abs().max() < error


# What is refused


def test_another_attention_function() -> None:
    with pytest.raises(UnsupportedOptionError, match='attn_implementation="attn"'):
        greedy(tiny("llama"), "sdpa", PROMPTS, None, paged())


def test_a_pass_after_one_that_failed_needs_a_reset() -> None:
    model, cache = tiny("llama"), paged()
    with pytest.raises(UnsupportedOptionError, match="head_mask"):
        feed(model, cache, PROMPTS, head_mask=torch.ones(6))
    with pytest.raises(UnsupportedOptionError, match=r"call cache.reset\(\)"):
        feed(model, cache, PROMPTS)
    cache.reset()
    close(feed(model, cache, PROMPTS), logits(model, "eager", PROMPTS))


def test_keys_of_one_layer_with_values_of_another() -> None:
    from attn_transformers.new_tokens import new_tokens_of

    cache, states = paged(), torch.zeros(1, 2, 3, 8)
    key, value = cache.update(states, states.clone(), 0)
    assert new_tokens_of(key, value) is not None
    assert new_tokens_of(key.clone(), value.clone()) is None
    with pytest.raises(UnsupportedOptionError, match="changed keys or values"):
        new_tokens_of(key, value.clone())


def test_another_batch_size() -> None:
    model, cache = tiny("llama"), paged()
    feed(model, cache, PROMPTS)
    with pytest.raises(InvalidInputError, match="batch size is 3; allowed: 2"):
        feed(model, cache, token_ids(3, 1))


def test_a_mask_that_changes_the_past() -> None:
    model, cache = tiny("llama"), paged()
    feed(model, cache, PROMPTS, attention_mask=padding_mask(9, 4, 9))
    with pytest.raises(InvalidInputError, match="attention_mask is other in its past"):
        feed(model, cache, PROMPTS[:, :1], attention_mask=padding_mask(10, 6, 10))


def test_a_model_after_another() -> None:
    cache = paged()
    feed(tiny("llama"), cache, PROMPTS)
    with pytest.raises(UnsupportedOptionError, match="one model and one attn_implementation"):
        feed(tiny("mistral"), cache, PROMPTS)


def test_layers_with_a_state_of_their_own_need_the_configuration() -> None:
    with pytest.raises(UnsupportedOptionError, match=r"PagedCache\(model.config\)"):
        greedy(tiny("lfm2"), "attn", PROMPTS, None, paged())


def test_layers_of_a_kind_that_is_not_kept() -> None:
    config = DeepseekV32Config(num_hidden_layers=1)
    config.layer_types = ["indexed_attention"]
    with pytest.raises(UnsupportedOptionError, match="'indexed_attention'"):
        PagedCache(config)
    with pytest.raises(UnsupportedOptionError, match="indexer"):
        paged().update_indexer(torch.zeros(1, 3, 8), 0)


@pytest.mark.parametrize("name", ["block_size", "max_blocks"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "x"])
def test_what_is_no_count_is_refused_when_the_cache_is_made(name: str, value: Any) -> None:
    with pytest.raises(InvalidInputError, match=f"{name} is .*; allowed: an integer >= 1"):
        PagedCache(**{name: value})


def test_formats_and_configurations_that_are_none_are_refused_at_once() -> None:
    with pytest.raises(UnknownNameError, match="unknown kv_cache_dtype 'int3'"):
        PagedCache(kv_cache_dtype="int3")
    with pytest.raises(InvalidInputError, match="config is a str; allowed: a model's config"):
        PagedCache("llama")


def test_rows_that_are_not_there_are_refused_and_nothing_changes() -> None:
    model, cache = tiny("llama"), paged()
    feed(model, cache, PROMPTS)
    before = cache.usage()
    wrong: list[Any] = [None, [0], torch.tensor([0, 2]), torch.tensor([0.5]), torch.ones(3).bool()]
    for rows in wrong:
        with pytest.raises(InvalidInputError, match="beam_idx is"):
            cache.reorder_cache(rows)
        with pytest.raises(InvalidInputError, match="indices is"):
            cache.batch_select_indices(rows)
    with pytest.raises(InvalidInputError, match="repeats is 0; allowed: an integer >= 1"):
        cache.batch_repeat_interleave(0)
    with pytest.raises(InvalidInputError, match="tokens_to_remove is a str; allowed: an int"):
        cache.crop("x")  # type: ignore[arg-type]
    assert (cache.get_seq_length(), cache.usage()) == (9, before)


@pytest.mark.parametrize("backend", ["attn", "attn:TORCH_SDPA", "attn:FLEX_ATTENTION"])
@pytest.mark.parametrize("kept", [0, 5])
def test_a_token_of_nan_that_was_cropped_is_gone(backend: str, kept: int) -> None:
    good, cache = tiny("llama"), paged(block_size=16)
    bad = copy.deepcopy(good)
    for name in ("k_proj", "v_proj"):
        torch.nn.init.constant_(getattr(bad.model.layers[0].self_attn, name).weight, torch.nan)
    tokens = token_ids(2, 6)
    if kept:
        logits(good, backend, tokens[:, :kept], cache=cache)
    assert logits(bad, backend, token_ids(2, 3), cache=cache).isnan().any()
    cache.crop(-3)
    found = logits(good, backend, tokens[:, kept:], cache=cache)
    close(found, logits(good, "eager", tokens)[:, kept:])
    for group in cache._groups.values():
        assert not any(each.isnan().any() for each in group.caches.values())


def test_rows_that_found_no_blocks_are_not_gone_on_with() -> None:
    model, cache = tiny("llama"), paged(max_blocks=4)
    feed(model, cache, PROMPTS[:, :6])  # 2 rows of 2 blocks, the last of each half full
    with pytest.raises(InvalidInputError, match="blocks needed is more than 4"):
        cache.batch_repeat_interleave(2)
    for going_on in (lambda: feed(model, cache, PROMPTS[:, :1]), lambda: cache.crop(-1)):
        with pytest.raises(UnsupportedOptionError, match=r"failed while it chose rows.*reset\(\)"):
            going_on()
    cache.reset()
    close(feed(model, cache, PROMPTS[:, :6]), logits(model, "eager", PROMPTS[:, :6]))
    assert cache.usage().used_blocks == 4
