"""The exact path by hand, and that cutting heads changes nothing."""

from __future__ import annotations

import math

import pytest
import torch

from attn_torch._exact import ExactOptions, exact_attention

PLAIN = ExactOptions(scale=1.0)


def _tensors(rows: int = 2, keys: int = 3) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    shapes = ((2, rows, 6, 4), (2, keys, 3, 4), (2, keys, 3, 5))
    return tuple(torch.randn(shape, generator=generator) for shape in shapes)


def _one(*logits: float) -> tuple[torch.Tensor, ...]:
    """Return query, key and value of one head whose logits are as given and values 1, 2, ..."""
    key = torch.tensor(logits).view(1, -1, 1, 1)
    value = torch.arange(1.0, len(logits) + 1).view(1, -1, 1, 1)
    return torch.ones(1, 1, 1, 1), key, value


def test_two_keys_by_hand():
    output, lse = exact_attention(*_one(0.0, math.log(3.0)), PLAIN)
    assert output.item() == pytest.approx((1 * 1 + 3 * 2) / 4)
    assert lse.item() == pytest.approx(math.log(4.0))


def test_a_sink_enters_the_denominator_once():
    options = ExactOptions(scale=1.0, sinks=torch.tensor([math.log(4.0)]))
    output, lse = exact_attention(*_one(0.0, math.log(3.0)), options)
    assert output.item() == pytest.approx((1 * 1 + 3 * 2) / 8)
    assert lse.item() == pytest.approx(math.log(8.0))


def test_a_sink_far_above_the_logits_takes_everything():
    options = ExactOptions(scale=1.0, sinks=torch.tensor([200.0]))
    output, lse = exact_attention(*_one(0.0, 1.0), options)
    assert output.item() == pytest.approx(0.0, abs=1e-30)
    assert lse.item() == 200.0


def test_scale_then_softcap_then_alibi():
    options = ExactOptions(scale=0.5, softcap=2.0, alibi_slopes=torch.tensor([0.25]))
    distance = torch.tensor([[[3, 1]]])
    _, lse = exact_attention(*_one(4.0, -4.0), options, distance=distance)
    capped = 2.0 * math.tanh(1.0)
    expected = math.log(math.exp(capped - 0.75) + math.exp(-capped - 0.25))
    assert lse.item() == pytest.approx(expected)


def test_a_capped_logit_far_out_stays_finite():
    options = ExactOptions(scale=1.0, softcap=1.0)
    output, lse = exact_attention(*_one(1e30, -1e30), options)
    assert output.item() == pytest.approx((math.e * 1 + 2 / math.e) / (math.e + 1 / math.e))
    assert lse.item() == pytest.approx(math.log(math.e + 1 / math.e))


def test_a_row_without_keys_has_output_0_and_the_sink_as_lse():
    mask = torch.zeros(1, 1, 2, dtype=torch.bool)
    output, lse = exact_attention(*_one(1.0, 2.0), PLAIN, mask=mask)
    assert (output.item(), lse.item()) == (0.0, -math.inf)
    options = ExactOptions(scale=1.0, sinks=torch.tensor([-0.5]))
    output, lse = exact_attention(*_one(1.0, 2.0), options, mask=mask)
    assert (output.item(), lse.item()) == (0.0, -0.5)


def test_a_negative_scale_turns_the_order_around():
    output, _ = exact_attention(*_one(0.0, 100.0), ExactOptions(scale=-1.0))
    assert output.item() == pytest.approx(1.0)


@pytest.mark.parametrize("max_bytes", [1, 2 * 2 * 2 * 3 * 4, 10**9])
def test_cutting_heads_changes_nothing(max_bytes):
    options = ExactOptions(
        scale=0.3, sinks=torch.linspace(-1, 1, 6), alibi_slopes=torch.linspace(0, 1, 6)
    )
    distance = torch.arange(6).view(1, 2, 3)
    whole = exact_attention(*_tensors(), options, distance=distance)
    parts = exact_attention(*_tensors(), options, distance=distance, max_bytes=max_bytes)
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    assert whole[0].shape == (2, 2, 3, 2, 5)
    assert whole[1].shape == (2, 3, 2, 2)


def test_float64_is_accumulated_where_asked():
    query, key, value = _tensors()
    options = ExactOptions(scale=0.3, accumulate=torch.float64)
    output, lse = exact_attention(query, key, value, options)
    assert output.dtype is lse.dtype is torch.float64
    logits = torch.einsum("rnhd,rlhd->rhnl", query[:, :, ::2].double(), key.double()) * 0.3
    torch.testing.assert_close(lse[:, :, 0], logits.logsumexp(-1), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("num_keys", [1, 127, 128, 129, 300, 2500])
@pytest.mark.parametrize("width", [4, 300])
def test_split_sums_are_the_same_sums(num_keys, width):
    generator = torch.Generator().manual_seed(2)
    query, key = (torch.randn(2, rows, 4, width, generator=generator) for rows in (2, num_keys))
    mask = torch.ones(1, 2, num_keys, dtype=torch.bool)
    mask[..., 1::3] = False
    whole, parts = (
        exact_attention(query, key, key, ExactOptions(scale=0.05, splits_sums=splits), mask=mask)
        for splits in (False, True)
    )
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
