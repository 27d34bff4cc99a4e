"""Scales as numbers of the host, read once."""

from __future__ import annotations

import pytest
import torch
from fa_testing import layer_object

from attn_cuda._fi_scales import Scales
from attn_shared.errors import UnsupportedOptionError


def test_numbers_are_taken_as_they_are_and_tensors_read_again_when_written() -> None:
    scale = torch.tensor([0.5])
    layer = layer_object(k_scale=scale, v_scale=3.0, q_scale=2)
    scales = Scales("FLASHINFER")
    assert scales.of(layer) == (0.5, 3.0, 2.0)
    scale.fill_(0.25)
    assert scales.of(layer) == (0.25, 3.0, 2.0)
    layer.k_scale = torch.tensor([4.0])
    assert scales.of(layer)[0] == 4.0


def test_a_scale_per_head_is_refused_with_its_shape() -> None:
    layer = layer_object(v_scale=torch.ones(2))
    with pytest.raises(UnsupportedOptionError, match=r"layer.v_scale of shape \(2,\).*one number"):
        Scales("FLASHINFER").of(layer)
