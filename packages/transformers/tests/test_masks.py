"""The mask function recognises rules, refuses others by name, and its masks carry the rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hf_testing import padding_mask
from transformers import masking_utils as hf

from attn_shared.errors import InvalidInputError, UnsupportedOptionError
from attn_transformers.masks import StepMask, attention_mask, step_of


def step(**options: Any) -> StepMask:
    plain = {"batch_size": 2, "q_length": 4, "kv_length": 4}
    return step_of(attention_mask(**plain | options))


@pytest.mark.parametrize(
    ("function", "local_size", "is_causal", "window"),
    [
        (None, None, True, (None, None)),
        (hf.causal_mask_function, None, True, (None, None)),
        (hf.bidirectional_mask_function, None, False, (None, None)),
        (hf.sliding_window_causal_mask_function(5), 5, True, (4, 0)),
        (hf.sliding_window_causal_mask_function(1), 1, True, (0, 0)),
        (hf.sliding_window_bidirectional_mask_function(3), 3, False, (3, 3)),
    ],
)
def test_rules_that_backends_know(
    function: Any, local_size: int | None, is_causal: bool, window: tuple[int | None, int | None]
) -> None:
    found = step(mask_function=function, local_size=local_size)
    assert (found.is_causal, found.window) == (is_causal, window)


def everything(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return query >= 0


@pytest.mark.parametrize(
    ("function", "local_size", "words"),
    [
        (hf.chunked_causal_mask_function(4, torch.zeros(2)), 4, "attention_chunk_size"),
        (hf.or_masks(hf.causal_mask_function, everything), None, "everything"),
        (hf.and_masks(hf.causal_mask_function, everything), None, "everything"),
        (
            hf.or_masks(hf.causal_mask_function, hf.blockwise_overlay(torch.zeros(2, 4))),
            None,
            "block_sequence_ids",
        ),
        (
            hf.and_masks(
                hf.causal_mask_function, hf.packed_sequence_mask_function(torch.zeros(2, 4))
            ),
            None,
            "packed sequences",
        ),
        (
            hf.remap_positions_for_packed_sequence(hf.causal_mask_function, torch.zeros(2, 4)),
            None,
            "packed sequences",
        ),
        # A window of another size than the model says, and one mixed with something else.
        (hf.sliding_window_causal_mask_function(6), 5, "sliding window"),
        (hf.and_masks(hf.sliding_window_causal_mask_function(5), everything), 5, "everything"),
        (hf.sliding_window_causal_mask_function(5), None, "sliding window"),
        (everything, None, "everything"),
    ],
)
def test_rules_that_they_do_not_know(
    function: Callable[..., Any], local_size: int | None, words: str
) -> None:
    with pytest.raises(UnsupportedOptionError, match=words):
        step(mask_function=function, local_size=local_size)


def test_functions_of_the_model_are_named_as_such() -> None:
    mixed = hf.or_masks(hf.causal_mask_function, everything)
    with pytest.raises(UnsupportedOptionError, match="or_mask_function"):
        step(mask_function=mixed, use_vmap=True)


def test_no_padding_is_no_padding() -> None:
    assert step().is_real is None
    assert step(attention_mask=torch.ones(2, 4, dtype=torch.long)).is_real is None


def test_padding_is_cut_to_the_keys_that_are_handed_out() -> None:
    mask = padding_mask(6, 3, 5)  # 000111 and 011111
    found = step(q_length=1, kv_length=4, q_offset=5, kv_offset=2, attention_mask=mask)
    assert found.is_real is not None
    assert found.is_real.tolist() == [[False, True, True, True], [True] * 4]
    assert not found.has_gap


def test_places_past_the_mask_are_padding() -> None:
    found = step(
        mask_function=hf.bidirectional_mask_function,
        attention_mask=torch.ones(2, 3, dtype=torch.bool),
    )
    assert found.is_real is not None
    assert found.is_real.tolist() == [[True, True, True, False]] * 2


def test_a_gap_before_the_keys_is_noted() -> None:
    mask = torch.tensor([[1, 0, 1, 1], [1, 1, 1, 1]])
    found = step(q_length=1, kv_length=2, q_offset=3, kv_offset=2, attention_mask=mask)
    assert found.has_gap
    assert found.is_real is not None
    assert bool(found.is_real.all())


def test_slots_of_tokens_to_come_are_no_keys() -> None:
    found = step(q_length=2, kv_length=10, q_offset=torch.tensor(3))
    assert (found.query_start, found.key_len, found.handed_len) == (3, 5, 10)


def test_a_mask_of_other_rows_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"attention_mask shape is \(3, 4\)"):
        step(attention_mask=torch.ones(3, 4, dtype=torch.long))


def test_a_mask_takes_no_memory_and_has_the_usual_shape() -> None:
    mask = attention_mask(batch_size=2, q_length=3, kv_length=5)
    assert tuple(mask.shape) == (2, 1, 3, 5)
    assert mask.untyped_storage().nbytes() == 1


@pytest.mark.parametrize(
    "move", [torch.Tensor.contiguous, torch.Tensor.clone, lambda mask: mask.to("cpu")]
)
def test_moving_a_mask_keeps_its_rules(move: Callable[[torch.Tensor], torch.Tensor]) -> None:
    mask = attention_mask(batch_size=2, q_length=3, kv_length=5, q_offset=2)
    assert step_of(move(mask)) is step_of(mask)


def test_the_last_queries_of_a_mask() -> None:
    mask = attention_mask(batch_size=2, q_length=4, kv_length=6, q_offset=2)
    last = step_of(mask[:, :, slice(-1, None), :])
    assert (last.query_start, last.query_len, last.key_len) == (5, 1, 6)
    assert last.memo is not step_of(mask).memo


@pytest.mark.parametrize(
    "change",
    [
        lambda mask: mask[:, :, :, :2],
        lambda mask: mask[:, :, 1:, :],
        lambda mask: mask[:, :, -9:, :],
        lambda mask: ~mask,
        lambda mask: mask & mask,
        lambda mask: mask.float(),
        lambda mask: mask.new_ones(mask.shape),
    ],
)
def test_a_changed_mask_has_no_rules(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    mask = attention_mask(batch_size=2, q_length=3, kv_length=5, q_offset=2)
    with pytest.raises(UnsupportedOptionError, match="not made by attn's mask function"):
        step_of(change(mask))


@pytest.mark.parametrize("mask", [torch.ones(2, 4), torch.ones(2, 1, 4, 4), "causal"])
def test_a_prepared_mask_has_no_rules(mask: object) -> None:
    with pytest.raises(UnsupportedOptionError, match="2D padding mask"):
        step_of(mask)
