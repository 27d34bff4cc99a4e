"""What is put right beside a kernel's call: sinks, an LSE without keys, fp8 factors."""

from __future__ import annotations

import math

import pytest
import torch

from attn_cuda._fa_edges import Descales, Sinks, without_positive_infinity
from attn_cuda._fa_providers import Provider
from attn_shared.quantization import quantize_fp8

THIRD = Provider(library="flash_attn_3", version=3)
FOURTH = Provider(library="flash_attn_4", version=4)


def test_a_row_without_keys_is_minus_infinity() -> None:
    lse = without_positive_infinity(torch.tensor([[math.inf, 0.5, -math.inf]]))
    assert lse.tolist() == [[-math.inf, 0.5, -math.inf]]


def test_sinks_that_bfloat16_holds_are_converted_once() -> None:
    held, sinks = Sinks(THIRD), torch.tensor([1.0, -0.5])
    first, is_exact = held.of(sinks)
    assert is_exact
    assert first is not None
    assert first.dtype is torch.bfloat16
    assert held.of(sinks)[0] is first


def test_sinks_that_change_in_place_are_looked_at_again() -> None:
    held, sinks = Sinks(THIRD), torch.tensor([1.0, -0.5])
    held.of(sinks)
    sinks[0] = 2.0
    converted, is_exact = held.of(sinks)
    assert is_exact
    assert converted is not None
    assert converted.tolist() == [2.0, -0.5]
    sinks[0] = 1.001
    assert held.of(sinks)[1] is False


def test_other_generations_take_sinks_as_they_are() -> None:
    sinks = torch.tensor([1.001])
    assert Sinks(FOURTH).of(sinks) == (sinks, True)
    assert Sinks(THIRD).of(None) == (None, True)


def test_rounded_sinks_are_corrected_in_output_and_lse() -> None:
    # One key of logit 0 and value 1; the sink is 5.01, and 5.0 in bfloat16.
    rounded, sink = torch.tensor([5.0], dtype=torch.bfloat16), torch.tensor([5.01])
    output = torch.tensor([[[1 / (1 + math.exp(5.0))]]])
    lse = torch.tensor([[math.log(1 + math.exp(5.0))]])

    corrected = Sinks.correct(output, lse, sink, rounded)

    assert corrected.item() == pytest.approx(math.log(1 + math.exp(5.01)), abs=1e-6)
    assert output.item() == pytest.approx(1 / (1 + math.exp(5.01)), rel=1e-5)


def test_a_row_without_keys_has_the_sink_for_its_lse() -> None:
    rounded, sink = torch.tensor([5.0], dtype=torch.bfloat16), torch.tensor([5.01])
    output = torch.zeros(1, 1, 2)
    assert Sinks.correct(output, torch.full((1, 1), -math.inf), sink, rounded).item() == (
        pytest.approx(5.01)
    )
    assert output.tolist() == [[[0.0, 0.0]]]


def test_a_row_whose_keys_weigh_nothing_beside_the_sink() -> None:
    rounded, sink = torch.tensor([5.0], dtype=torch.bfloat16), torch.tensor([5.01])
    output = torch.zeros(1, 1, 2)
    corrected = Sinks.correct(output, torch.full((1, 1), math.inf), sink, rounded)
    assert corrected.item() == pytest.approx(5.01)
    assert output.tolist() == [[[0.0, 0.0]]]


@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        (0.5, [[0.5, 0.5]] * 3),
        (torch.tensor(0.25), [[0.25, 0.25]] * 3),
        (torch.tensor([2.0]), [[2.0, 2.0]] * 3),
        (torch.tensor([1.0, 4.0]), [[1.0, 4.0]] * 3),
    ],
    ids=["number", "scalar", "one", "per-head"],
)
def test_factors_are_one_per_request_and_head(
    scale: float | torch.Tensor, expected: list[list[float]]
) -> None:
    found = Descales(2, 2).of(scale, 3, torch.device("cpu"))
    assert found.dtype is torch.float32
    assert found.tolist() == expected


def test_a_number_becomes_one_tensor() -> None:
    descales = Descales(2, 2)
    first, second = (descales.of(0.5, 3, torch.device("cpu")) for _ in range(2))
    assert first.data_ptr() == second.data_ptr()


def test_factors_of_a_tensor_are_kept_and_follow_its_contents() -> None:
    descales, scale = Descales(2, 2), torch.tensor([1.0, 4.0])
    first = descales.of(scale, 3, torch.device("cpu"))
    scale[1] = 8.0
    assert descales.of(scale, 3, torch.device("cpu")) is first
    assert first.tolist() == [[1.0, 8.0]] * 3
    assert descales.of(scale.clone(), 3, torch.device("cpu")) is not first
    assert descales.of(scale, 2, torch.device("cpu")).shape == (2, 2)


def test_only_so_many_factors_are_kept() -> None:
    descales = Descales(2, 2)
    for count in range(1, 600):
        assert descales.of(0.5, count, torch.device("cpu")).shape == (count, 2)
    assert len(descales._factors) <= 256


def test_a_query_with_a_gradient_is_quantised_without() -> None:
    query = torch.full((1, 4, 8), 500.0, requires_grad=True)
    stored = Descales(2, 2).quantized(query, 1.0)
    assert not stored.requires_grad
    assert stored.float().max() == 448.0


def test_what_no_number_can_be_stays_it() -> None:
    query = torch.tensor([math.nan, math.inf, -math.inf, 0.3]).reshape(1, 1, 4)
    stored = Descales(1, 1).quantized(query, 1.0).float().flatten().tolist()
    assert math.isnan(stored[0])
    assert stored[1:] == [448.0, -448.0, 0.3125]


def test_the_query_is_quantised_by_kv_head() -> None:
    query = torch.full((1, 4, 8), 8.0)
    stored = Descales(2, 2).quantized(query, torch.tensor([1.0, 4.0]))
    assert stored.dtype is torch.float8_e4m3fn
    assert stored[0, :, 0].float().tolist() == [8.0, 8.0, 2.0, 2.0]
    assert Descales(2, 2).quantized(query * 1000, 1.0).float().max() == 448.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_scale_of_one_rounds_as_any_other(dtype: torch.dtype) -> None:
    query = torch.linspace(-1000, 1000, 4096, dtype=dtype).reshape(32, 4, 32)
    expected = quantize_fp8(query, 1.0, torch.float8_e4m3fn).float()
    assert torch.equal(Descales(2, 2).quantized(query, 1.0).float(), expected)
