"""Logits that FlashInfer's kernels hide by a finite number, and factors by which it would count."""

from __future__ import annotations

import pytest
import torch
from fi_testing import H200, fi_layer, fi_stubbed

from attn_conformance.outcome import Status
from attn_conformance.stubs.suite import run_rules
from attn_cuda import _fi_scales
from attn_cuda._fi_impl import FlashInferImpl
from attn_cuda._fi_scales import lift_of
from attn_shared.errors import UnsupportedOptionError

BF16, FP16 = torch.bfloat16, torch.float16


@pytest.mark.parametrize("scale", [0.125, 0.0884, 0.0625, 1 / 128, 2.0**-8])
def test_usual_factors_stay(scale: float) -> None:
    assert lift_of(scale, 1.0, BF16) == 1.0


@pytest.mark.parametrize("k_scale", [2.0**-16, 3.1e-5, 1e-3, 1e-8])
def test_small_factors_are_lifted_by_a_power_of_two(k_scale: float) -> None:
    lift = lift_of(0.0884, k_scale, BF16)
    assert lift < 1
    assert torch.frexp(torch.tensor(lift)).mantissa == 0.5
    assert 2.0**-4 <= 0.0884 * k_scale / lift < 2.0**-3
    assert (0.0884 * k_scale / lift) * lift == 0.0884 * k_scale


def test_a_float16_query_is_not_made_so_small_that_it_loses_digits() -> None:
    assert lift_of(0.125, 2.0**-12, FP16) == 2.0**-11
    with pytest.raises(UnsupportedOptionError, match=r"k_scale=1e-05.*hide logits by -50000"):
        lift_of(0.125, 1e-5, FP16)


def test_a_layer_with_a_tiny_scale_of_its_own_is_lifted_too() -> None:
    with fi_stubbed("0.6.13", H200):
        impl = FlashInferImpl(fi_layer(scale=-1e-5))
        assert impl._scaling_of((1.0, 1.0, 1.0)).lift == lift_of(1e-5, 1.0, BF16) < 1
        assert impl._scaling_of((4096.0, 1.0, 1.0)).lift == 1.0
        assert impl._scaling_of((1.0, 1.0, 1.0)).lift < 1


def test_the_stub_shows_hidden_logits_that_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_fi_scales, "_LEAST_EXPONENT", -100)
    with fi_stubbed("0.6.13", H200) as (_, subject):
        outcomes = list(run_rules(subject, ["fp8_saturates"]))
    messages = [item.message for item in outcomes if item.status is Status.FAILED]
    assert len(messages) == 3
    assert all("hidden logits are -" in message for message in messages)
