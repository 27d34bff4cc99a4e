"""Arguments that models give their attention function: served, without effect, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attn_shared.errors import InvalidRequestError, UnsupportedOptionError
from attn_transformers.masks import attention_mask, step_of
from attn_transformers.options import Rules, refuse_unserved, rules_of

CAUSAL = torch.nn.Module()
ENCODER = torch.nn.Module()
ENCODER.is_causal = False  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("attention_chunk_size", 8),
        ("block_table", torch.zeros(1)),
        ("cu_seq_lens_q", torch.zeros(2)),
        ("head_mask", torch.ones(4)),
        ("max_length_k", 7),
        ("output_attentions", True),
        ("position_bias", torch.zeros(1, 4, 2, 2)),
        ("seq_idx", torch.zeros(1)),
        ("something_new", "a"),
        ("something_new", False),
    ],
)
def test_what_would_change_the_result_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(UnsupportedOptionError, match=f"with {name}="):
        refuse_unserved({name: value}, 0.0)


@pytest.mark.parametrize(
    "extras",
    [
        {"position_ids": torch.arange(3), "use_cache": True, "output_hidden_states": True},
        {"output_attentions": False},
        {"head_mask": None, "something_new": None},
        {"deterministic": True},
    ],
)
def test_what_has_no_effect_is_let_through(extras: dict[str, Any]) -> None:
    refuse_unserved(extras, 0.0)


def test_dropout_is_refused() -> None:
    with pytest.raises(UnsupportedOptionError, match=r"dropout=0.1.*model.eval"):
        refuse_unserved({}, 0.1)


def test_a_long_value_is_shortened_in_the_message() -> None:
    with pytest.raises(UnsupportedOptionError) as caught:
        refuse_unserved({"something_new": "x" * 500}, 0.0)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("module", "is_causal", "expected"),
    [(CAUSAL, None, True), (ENCODER, None, False), (CAUSAL, False, False), (ENCODER, True, True)],
)
def test_causality_without_a_mask(
    module: torch.nn.Module, is_causal: bool | None, expected: bool
) -> None:
    found = rules_of(module, None, is_causal=is_causal, sliding_window=None, query_len=3)
    assert found == Rules(is_causal=expected, window=(None, None))


def test_a_window_of_w_keys_reaches_w_minus_1_to_the_left() -> None:
    found = rules_of(CAUSAL, None, is_causal=None, sliding_window=5, query_len=3)
    assert found.window == (4, 0)
    found = rules_of(ENCODER, None, is_causal=None, sliding_window=5, query_len=3)
    assert found.window == (4, 4)


@pytest.mark.parametrize("size", [0, -3])
def test_a_window_without_keys_is_refused(size: int) -> None:
    with pytest.raises(InvalidRequestError, match="window"):
        rules_of(CAUSAL, None, is_causal=None, sliding_window=size, query_len=3)


def sliding(size: int, *, is_causal: bool = True) -> Any:
    from transformers import masking_utils as hf

    factory = (
        hf.sliding_window_causal_mask_function
        if is_causal
        else hf.sliding_window_bidirectional_mask_function
    )
    mask = attention_mask(
        batch_size=1, q_length=3, kv_length=3, mask_function=factory(size), local_size=size
    )
    return step_of(mask)


@pytest.mark.parametrize(
    ("size", "is_causal", "argument", "window"),
    [
        (5, True, 5, (4, 0)),
        (5, True, None, (4, 0)),
        (5, False, 5, (5, 5)),
        (5, False, 6, (5, 5)),
        (5, False, None, (5, 5)),
    ],
)
def test_the_masks_window_holds(
    size: int, is_causal: bool, argument: int | None, window: tuple[int, int]
) -> None:
    step = sliding(size, is_causal=is_causal)
    found = rules_of(CAUSAL, step, is_causal=None, sliding_window=argument, query_len=3)
    assert found == Rules(is_causal=is_causal, window=window)


@pytest.mark.parametrize(("size", "argument"), [(5, 4), (5, 6)])
def test_another_window_than_the_masks_is_refused(size: int, argument: int) -> None:
    with pytest.raises(UnsupportedOptionError, match=f"sliding_window={argument} contradicts"):
        rules_of(CAUSAL, sliding(size), is_causal=None, sliding_window=argument, query_len=3)


def test_a_window_that_the_mask_does_not_have_is_refused() -> None:
    step = step_of(attention_mask(batch_size=1, q_length=3, kv_length=3))
    with pytest.raises(UnsupportedOptionError, match="sliding_window=5 contradicts"):
        rules_of(CAUSAL, step, is_causal=None, sliding_window=5, query_len=3)


def test_causality_against_the_mask_is_refused() -> None:
    step = step_of(attention_mask(batch_size=1, q_length=3, kv_length=3))
    with pytest.raises(UnsupportedOptionError, match="is_causal=False contradicts"):
        rules_of(CAUSAL, step, is_causal=False, sliding_window=None, query_len=3)
    # One query at the end sees every key either way.
    found = rules_of(CAUSAL, step, is_causal=False, sliding_window=None, query_len=1)
    assert found.is_causal
