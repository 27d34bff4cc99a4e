from __future__ import annotations

import math

import pytest
import torch

from attn_shared.errors import InvalidInputError
from attn_shared.quantization import (
    FP8_DTYPES,
    dequantize_fp8,
    dequantize_int8_per_token_head,
    quantize_fp8,
    quantize_int8_per_token_head,
)

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e4m3fnuz: 240.0, torch.float8_e5m2: 57344.0}


@pytest.mark.parametrize("dtype", FP8_DTYPES)
class TestFp8:
    def test_saturates_at_the_largest_finite_value(self, dtype: torch.dtype) -> None:
        largest = LARGEST[dtype]
        x = torch.tensor([[largest, 1.01 * largest, 3e38, math.inf, -3e38, -math.inf]])
        assert quantize_fp8(x, 1.0, dtype).float().tolist() == [[largest] * 4 + [-largest] * 2]

    def test_a_quotient_past_float32_saturates_too(self, dtype: torch.dtype) -> None:
        x = torch.tensor([[3e38, -3e38]])
        stored = quantize_fp8(x, 1e-3, dtype).float()
        assert stored.tolist() == [[LARGEST[dtype], -LARGEST[dtype]]]

    def test_no_finite_bfloat16_becomes_nan_or_infinite(self, dtype: torch.dtype) -> None:
        every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
        x = every.view(torch.bfloat16)
        x = x[x.isfinite()].reshape(1, -1)
        for scale in (1.0, 1e-3, 37.0):
            assert quantize_fp8(x, scale, dtype).float().isfinite().all()

    def test_nan_stays_nan(self, dtype: torch.dtype) -> None:
        assert quantize_fp8(torch.tensor([[math.nan]]), 1.0, dtype).float().isnan().all()

    def test_divides_to_store_and_multiplies_to_read(self, dtype: torch.dtype) -> None:
        x = torch.tensor([[6.0, -1.0, 0.0]])
        stored = quantize_fp8(x, 0.5, dtype)
        assert stored.float().tolist() == [[12.0, -2.0, 0.0]]
        assert dequantize_fp8(stored, 0.5).tolist() == [[6.0, -1.0, 0.0]]

    def test_one_scale_per_head(self, dtype: torch.dtype) -> None:
        x = torch.tensor([[[1.0, 2.0], [1.0, 2.0]]])
        scale = torch.tensor([0.5, 4.0])
        stored = quantize_fp8(x, scale, dtype)
        assert stored.float().tolist() == [[[2.0, 4.0], [0.25, 0.5]]]
        assert torch.equal(dequantize_fp8(stored, scale), x)

    @pytest.mark.parametrize("shape", [(), (1,)])
    def test_one_element_tensors_are_scales_of_the_tensor(
        self, dtype: torch.dtype, shape: tuple[int, ...]
    ) -> None:
        stored = quantize_fp8(torch.ones(2, 3, 4), torch.full(shape, 0.25), dtype)
        assert (stored.float() == 4).all()

    def test_reading_keeps_at_least_float32_until_the_end(self, dtype: torch.dtype) -> None:
        stored = quantize_fp8(torch.tensor([[1.0]]), 1.0, dtype)
        low = dequantize_fp8(stored, 1.0 + 2.0**-7, torch.bfloat16)
        assert (low.dtype, low.item()) == (torch.bfloat16, 1.0 + 2.0**-7)
        assert dequantize_fp8(stored, 1.0 + 2.0**-40, torch.float64).item() == 1.0 + 2.0**-40

    @pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf])
    def test_scales_that_divide_nothing(self, dtype: torch.dtype, scale: float) -> None:
        with pytest.raises(InvalidInputError, match="scale is"):
            quantize_fp8(torch.ones(1, 1), scale, dtype)

    def test_scales_of_another_number_of_heads(self, dtype: torch.dtype) -> None:
        with pytest.raises(InvalidInputError, match=r"scale\.shape is \(3,\)"):
            quantize_fp8(torch.ones(5, 2, 4), torch.ones(3), dtype)


def test_other_dtypes_are_not_fp8_caches() -> None:
    with pytest.raises(InvalidInputError, match=r"dtype is torch\.int8; allowed: .*e4m3fnuz"):
        quantize_fp8(torch.ones(1, 1), 1.0, torch.int8)
    with pytest.raises(InvalidInputError, match=r"torch\.uint8"):
        dequantize_fp8(torch.ones(1, 1, dtype=torch.uint8), 1.0)


class TestInt8:
    def test_the_largest_magnitude_becomes_127(self) -> None:
        x = torch.tensor([[[254.0, -2.0, 3.0], [-0.127, 0.0, 0.001]]])
        stored, scale = quantize_int8_per_token_head(x)
        # 3 / 2 = 1.5 rounds to the even 2.
        assert stored.tolist() == [[[127, -1, 2], [-127, 0, 1]]]
        assert scale.dtype == torch.float32
        assert scale.flatten().tolist() == pytest.approx([2.0, 0.001], rel=1e-6)

    def test_rows_of_zeros_read_back_as_zeros(self) -> None:
        stored, scale = quantize_int8_per_token_head(torch.zeros(2, 3, dtype=torch.float16))
        assert (stored.tolist(), scale.tolist()) == ([[0] * 3] * 2, [0.0] * 2)
        assert dequantize_int8_per_token_head(stored, scale).tolist() == [[0.0] * 3] * 2

    @pytest.mark.parametrize("magnitude", [1e-44, 1e-38, 1.0, 3e38])
    def test_error_is_at_most_half_a_step(self, magnitude: float) -> None:
        x = magnitude * torch.linspace(-1, 1, 401, dtype=torch.float64).reshape(1, -1).float()
        stored, scale = quantize_int8_per_token_head(x)
        error = (dequantize_int8_per_token_head(stored, scale, torch.float64) - x).abs().max()
        # Below the normal range a step is one subnormal, so that rounding the scale costs more.
        allowed = 0.5001 * scale.double().item() if magnitude > 1e-37 else magnitude
        assert error <= allowed

    def test_a_scale_rounded_down_saturates(self) -> None:
        # 180 of float32's smallest steps over 127 round to one step, of which x holds 180.
        step = 2.0**-149
        stored, scale = quantize_int8_per_token_head(torch.tensor([[180 * step, -180 * step]]))
        assert scale.item() == step
        assert stored.tolist() == [[127, -127]]

    def test_result_has_the_asked_dtype(self) -> None:
        stored = torch.tensor([[2]], dtype=torch.int8)
        result = dequantize_int8_per_token_head(stored, torch.tensor([0.5]), torch.bfloat16)
        assert (result.dtype, result.item()) == (torch.bfloat16, 1.0)

    def test_refusals(self) -> None:
        stored = torch.zeros(2, 3, dtype=torch.int8)
        with pytest.raises(InvalidInputError, match=r"stored\.dtype is torch\.float32"):
            dequantize_int8_per_token_head(stored.float(), torch.ones(2))
        with pytest.raises(InvalidInputError, match=r"scale\.shape is \(3,\); allowed: \(2,\)"):
            dequantize_int8_per_token_head(stored, torch.ones(3))
