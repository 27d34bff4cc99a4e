"""The attention function called directly: against the definition, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hf_testing import padding_mask, tiny, token_ids

from attn_shared.errors import InvalidInputError, UnsupportedOptionError
from attn_shared.reference import AttentionOptions, varlen_attention
from attn_shared.selection import Policy
from attn_transformers.attention import AttentionFunction
from attn_transformers.masks import attention_mask

HEADS, KV_HEADS, SIZE = 6, 2, 8
ATTEND = AttentionFunction(policy=Policy())


def states(batch_size: int, query_len: int, key_len: int, size_v: int = SIZE) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (
        (batch_size, HEADS, query_len, SIZE),
        (batch_size, KV_HEADS, key_len, SIZE),
        (batch_size, KV_HEADS, key_len, size_v),
    )
    return [torch.randn(shape, generator=generator) for shape in shapes]


def exact(row: list[torch.Tensor], options: AttentionOptions, *, causal: bool) -> torch.Tensor:
    """Return (Tq, Hq, Dv) of one row's states (H, T, D) by the definition in float64."""
    query, key, value = (tensor.transpose(0, 1) for tensor in row)
    result = varlen_attention(
        query,
        key,
        value,
        options,
        query_start_loc=torch.tensor([0, len(query)]),
        key_start_loc=torch.tensor([0, len(key)]),
        causal=causal,
    )
    return result.output.float()


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ({}, {"scale": SIZE**-0.5}),
        ({"scaling": 0.7}, {"scale": 0.7}),
        ({"softcap": 1.5}, {"scale": SIZE**-0.5, "softcap": 1.5}),
        ({"sliding_window": 3}, {"scale": SIZE**-0.5, "window": (2, 0)}),
        ({"s_aux": torch.arange(6.0)}, {"scale": SIZE**-0.5, "sinks": torch.arange(6.0)}),
    ],
)
@pytest.mark.parametrize("query_len", [7, 1])
def test_options_reach_the_backend(
    query_len: int, arguments: dict[str, Any], options: dict[str, Any]
) -> None:
    query, key, value = states(1, query_len, 7, size_v=5)
    found, weights = ATTEND(torch.nn.Module(), query, key, value, None, **arguments)
    assert weights is None
    assert found.is_contiguous()
    expected = exact([query[0], key[0], value[0]], AttentionOptions(**options), causal=True)
    torch.testing.assert_close(found[0], expected, rtol=1e-5, atol=1e-5)


def test_cross_attention_answers_every_query_whatever_the_keys_padding() -> None:
    # As many queries as keys: the mask still speaks of keys alone.
    from transformers import masking_utils as hf

    query, key, value = states(2, 5, 5)
    mask = attention_mask(
        batch_size=2,
        q_length=5,
        kv_length=5,
        mask_function=hf.bidirectional_mask_function,
        attention_mask=padding_mask(5, 2, 4, side="right"),
    )
    found, _ = ATTEND(torch.nn.Module(), query, key, value, mask)
    options = AttentionOptions(scale=SIZE**-0.5)
    for row, length in enumerate((2, 4)):
        real = [query[row], key[row, :, :length], value[row, :, :length]]
        expected = exact(real, options, causal=False)
        torch.testing.assert_close(found[row], expected, rtol=1e-5, atol=1e-5)


def test_rows_of_padding_alone() -> None:
    query, key, value = states(2, 3, 3)
    mask = attention_mask(
        batch_size=2, q_length=3, kv_length=3, attention_mask=torch.zeros(2, 3, dtype=torch.bool)
    )
    found, _ = ATTEND(torch.nn.Module(), query, key, value, mask)
    assert tuple(found.shape) == (2, 3, HEADS, SIZE)
    assert not found.any()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"dropout": 0.1}, "dropout=0.1"),
        ({"output_attentions": True}, "output_attentions=True"),
        ({"position_bias": torch.zeros(1)}, "position_bias"),
        ({"head_mask": torch.ones(6)}, "head_mask"),
        ({"unheard_of": 1}, "unheard_of=1"),
    ],
)
def test_arguments_that_are_not_served(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedOptionError, match=words):
        ATTEND(torch.nn.Module(), *states(1, 3, 3), None, **arguments)


def test_a_prepared_mask() -> None:
    with pytest.raises(UnsupportedOptionError, match=r"attention_mask Tensor \(1, 1, 3, 3\)"):
        ATTEND(torch.nn.Module(), *states(1, 3, 3), torch.ones(1, 1, 3, 3).bool())


def test_gradients() -> None:
    query, key, value = states(1, 3, 3)
    with pytest.raises(UnsupportedOptionError, match="no_grad"):
        ATTEND(torch.nn.Module(), query.requires_grad_(), key, value, None)
    with torch.no_grad():
        ATTEND(torch.nn.Module(), query, key, value, None)


def test_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(UnsupportedOptionError, match="being compiled"):
        ATTEND(torch.nn.Module(), *states(1, 3, 3), None)


def test_queries_in_the_middle_without_a_mask() -> None:
    with pytest.raises(InvalidInputError, match="query length without a mask is 2"):
        ATTEND(torch.nn.Module(), *states(1, 2, 5), None)


def test_keys_that_the_mask_was_not_made_for() -> None:
    mask = attention_mask(batch_size=1, q_length=3, kv_length=3)
    with pytest.raises(InvalidInputError, match=r"\(3, 5\); allowed: \(3, 3\)"):
        ATTEND(torch.nn.Module(), *states(1, 3, 5), mask)


def test_batches_that_differ() -> None:
    query, key, value = states(2, 3, 3)
    with pytest.raises(InvalidInputError, match="shapes of query, key and value"):
        ATTEND(torch.nn.Module(), query, key[:1], value[:1], None)


def test_packed_sequences_are_refused_by_the_mask() -> None:
    model = tiny("llama")
    model.set_attn_implementation("attn")
    positions = torch.tensor([[0, 1, 2, 0, 1]])
    with torch.no_grad(), pytest.raises(UnsupportedOptionError, match="packed sequences"):
        model(token_ids(1, 5), position_ids=positions, use_cache=False)
