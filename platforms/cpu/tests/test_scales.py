from __future__ import annotations

import torch

from attn_cpu._scales import ScaleTensors


def test_a_number_becomes_one_tensor_once() -> None:
    scales = ScaleTensors()
    made = scales.of(0.5)
    assert made.dtype is torch.float32
    assert made.tolist() == [0.5]
    assert scales.of(0.5) is made
    assert scales.of(2.0).tolist() == [2.0]


def test_tensors_are_read_anew() -> None:
    scales = ScaleTensors()
    given = torch.tensor([1.0, 2.0])
    assert scales.of(given).data_ptr() == given.data_ptr()
    assert scales.of(torch.tensor(3.0, dtype=torch.float64)).tolist() == [3.0]
