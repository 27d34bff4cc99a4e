"""The sampler that each preset gets, from any machine, by the platforms that are installed."""

from __future__ import annotations

import json

import pytest
import torch

from attn_shared.device import PRESETS, Vendor
from attn_shared.sampling import (
    Returns,
    Sampler,
    SamplerRequest,
    SamplingParams,
    sampler_selection,
)
from attn_shared.selection import Policy, VerdictStatus

OLD = {"t4", "v100"}


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("returns", list(Returns))
def test_every_preset_has_a_sampler_that_says_why(name: str, returns: Returns) -> None:
    device = PRESETS[name]
    request = SamplerRequest(top_k=True, returns=returns)
    selection = sampler_selection(request, device)
    has_fast = device.vendor is Vendor.NVIDIA and name not in OLD and returns is Returns.IDS
    expected = "FLASHINFER" if has_fast else "TORCH"
    assert selection.chosen == expected
    assert json.loads(json.dumps(selection.to_dict()))["chosen"] == expected
    named = sampler_selection(request, device, Policy(backend="TORCH"))
    assert named.chosen == "TORCH"
    assert "is simulated" in str(selection)
    for verdict in selection.verdicts:
        assert verdict.summary()
        assert (verdict.status is VerdictStatus.REJECTED) is bool(verdict.reasons)


def test_this_machines_cpu_samples() -> None:
    logits = torch.tensor([[0.0, 5.0, 1.0], [9.0, 0.0, 0.0]])
    drawn = Sampler("cpu").sample(logits, SamplingParams(temperature=0))
    assert drawn.ids.tolist() == [1, 0]
    assert drawn.selection.chosen == "TORCH"
