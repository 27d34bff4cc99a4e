"""Sinks in the narrow dtype of a kernel; platforms test them beside their kernels as well."""

from __future__ import annotations

import torch

from attn_shared.rounded_sinks import RoundedSinks


def test_the_kernels_dtype_decides_what_is_exact() -> None:
    sinks = torch.tensor([1.0, 0.5009765625])  # float16 holds the second, bfloat16 does not
    half, is_exact = RoundedSinks(torch.float16).of(sinks)
    assert is_exact
    assert half is not None
    assert half.dtype is torch.float16
    rounded, is_exact = RoundedSinks(torch.bfloat16).of(sinks)
    assert not is_exact
    assert rounded is not None
    assert rounded.tolist() == [1.0, 0.5]


def test_sinks_past_the_kernels_range_are_not_exact() -> None:
    assert RoundedSinks(torch.float16).of(torch.tensor([1e6]))[1] is False


def test_a_kernel_of_float32_takes_them_as_they_are() -> None:
    sinks = torch.tensor([1.001])
    assert RoundedSinks(None).of(sinks) == (sinks, True)
    assert RoundedSinks(torch.bfloat16).of(None) == (None, True)
