"""The process's float32 switches are read, whichever API set them, and never written."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from attn_torch._precision import accumulator_dtype, fuses_ieee_float32, has_ieee_float32

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    """Leave every switch as torch starts with it."""
    yield
    torch.set_float32_matmul_precision("highest")


def test_float32_is_ieee_as_torch_starts():
    assert has_ieee_float32(CPU)
    assert has_ieee_float32(CUDA)
    assert accumulator_dtype(CPU) is torch.float32


def test_only_a_cpus_fused_kernels_keep_float32():
    assert fuses_ieee_float32(CPU)
    assert not fuses_ieee_float32(CUDA)
    assert not fuses_ieee_float32(torch.device("xpu"))


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_the_legacy_switch_widens_the_accumulator(precision):
    torch.set_float32_matmul_precision(precision)
    assert not has_ieee_float32(CUDA)
    assert accumulator_dtype(CPU) is torch.float64


@pytest.mark.skipif(
    not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="torch before 2.9"
)
def test_the_new_switch_concerns_its_device_alone():
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        assert not has_ieee_float32(CUDA)
        assert has_ieee_float32(CPU)
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    finally:
        torch.backends.cuda.matmul.fp32_precision = "none"
