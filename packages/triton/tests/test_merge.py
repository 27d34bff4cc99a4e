"""Merging two states with Triton: shares by hand, empty sides bit for bit, memory, refusals."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_shared import merge as by_torch
from attn_shared.errors import InvalidInputError, UnsupportedOptionError
from attn_shared.reference import AttentionOptions, attention
from attn_triton.merge import merge_attn_states, merge_into

INF = math.inf
CPU = torch.device("cpu")


def randn(*shape: int, seed: int, device: torch.device = CPU) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


def states(device: torch.device, tokens: int = 3, heads: int = 2, size: int = 4) -> list[Tensor]:
    """Return output_a, lse_a, output_b, lse_b."""
    shapes = [(tokens, heads, size), (heads, tokens)] * 2
    return [randn(*shape, seed=seed, device=device) for seed, shape in enumerate(shapes)]


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.int32)


def test_shares_follow_the_exponentials(device: torch.device) -> None:
    # Denominators 1 and 3: shares 1/4 and 3/4, merged denominator 4.
    out = torch.full((1, 1, 1), 8.0, device=device)
    lse = torch.zeros(1, 1, device=device)
    output, merged = merge_attn_states(out, lse, out / 2, lse + math.log(3))
    assert output.item() == pytest.approx(5.0, rel=1e-6)
    assert merged.item() == pytest.approx(math.log(4), rel=1e-6)


@pytest.mark.parametrize(("first", "second"), [(3e4, 3e4 - 30), (-3e38, 3e38), (-200.0, -190.0)])
def test_lses_far_apart_or_large_do_not_overflow(
    first: float, second: float, device: torch.device
) -> None:
    ones = torch.ones(1, 1, 1, device=device)
    lses = [torch.full((1, 1), lse, device=device) for lse in (first, second)]
    output, lse = merge_attn_states(ones, lses[0], 3 * ones, lses[1])
    low = math.exp(min(first, second) - max(first, second))
    expected = (3 + low) / (1 + low) if second > first else (1 + 3 * low) / (1 + low)
    assert output.item() == pytest.approx(expected, rel=1e-6)
    assert lse.item() == pytest.approx(max(first, second) + math.log1p(low), rel=1e-6)


@pytest.mark.parametrize("empty", [-INF, INF])
@pytest.mark.parametrize("payload", [math.nan, INF, 0.0])
@pytest.mark.parametrize("swap", [False, True])
def test_the_only_side_with_keys_comes_out_bit_for_bit(
    empty: float, payload: float, swap: bool, device: torch.device
) -> None:
    kept, kept_lse, nothing, nothing_lse = states(device)
    kept[0, 0], kept_lse[1, 2] = -0.0, -0.0
    nothing.fill_(payload)
    nothing_lse.fill_(empty)
    sides = [(kept, kept_lse), (nothing, nothing_lse)]
    (out_a, lse_a), (out_b, lse_b) = reversed(sides) if swap else sides
    output, lse = merge_attn_states(out_a, lse_a, out_b, lse_b)
    assert torch.equal(bits(output), bits(kept))
    assert torch.equal(bits(lse), bits(kept_lse))


@pytest.mark.parametrize("pair", [(-INF, -INF), (-INF, INF), (INF, INF)])
def test_both_empty_gives_zero_and_minus_infinity(
    pair: tuple[float, float], device: torch.device
) -> None:
    out_a, lse_a, out_b, lse_b = states(device)
    lse_a[1, 2], lse_b[1, 2] = pair
    out_a[2, 1], out_b[2, 1] = math.nan, INF
    output, lse = merge_attn_states(out_a, lse_a, out_b, lse_b)
    assert not bits(output[2, 1]).any()
    assert lse[1, 2] == -INF
    lse[1, 2] = 0.0
    assert output.isfinite().all()
    assert lse.isfinite().all()


@pytest.mark.parametrize("other", [1.0, -INF, math.nan])
def test_nan_propagates_to_its_row_alone(other: float, device: torch.device) -> None:
    out_a, lse_a, out_b, lse_b = states(device)
    lse_a[1, 2], lse_b[1, 2] = math.nan, other
    output, lse = merge_attn_states(out_a, lse_a, out_b, lse_b)
    assert lse.isnan().nonzero().tolist() == [[1, 2]]
    assert output.isnan().all(-1).nonzero().tolist() == [[2, 1]]
    assert output.isnan().sum() == 4


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(
    ("dtype", "ulp"), [(torch.float32, 2**-23), (torch.bfloat16, 2**-7), (torch.float16, 2**-10)]
)
def test_a_shared_prefix_and_the_causal_rest_are_the_whole(
    dtype: torch.dtype, ulp: float, sinks: bool, device: torch.device
) -> None:
    shapes = [(3, 4, 8), (9, 2, 8), (9, 2, 5)]
    query, key, value = (randn(*shape, seed=seed).double() for seed, shape in enumerate(shapes))
    bare = AttentionOptions(scale=0.4)
    with_sinks = AttentionOptions(scale=0.4, sinks=torch.tensor([0.0, 1.0, -2.0, 3.0]))
    options = with_sinks if sinks else bare
    parts = [
        attention(query, key[:6], value[:6], bare, causal=False),
        attention(query, key[6:], value[6:], options),
    ]
    whole = attention(query, key, value, options)
    given = [side for part in parts for side in (part.output.to(dtype), part.lse.float())]
    output, lse = merge_attn_states(*(tensor.to(device) for tensor in given))
    assert (output.dtype, lse.dtype) == (dtype, torch.float32)
    largest = max(float(part.output.abs().max()) for part in parts)
    assert (output.cpu().double() - whole.output).abs().max() <= 2 * ulp * largest
    torch.testing.assert_close(lse.cpu().double(), whole.lse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("size", [1, 5, 64, 96, 200])
def test_any_size_of_heads_and_number_of_rows(size: int, device: torch.device) -> None:
    given = states(device, tokens=11, heads=3, size=size)
    for got, expected in zip(
        merge_attn_states(*given), by_torch.merge_attn_states(*given), strict=True
    ):
        torch.testing.assert_close(got, expected, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("outputs_are_double", [False, True])
def test_double_precision(outputs_are_double: bool, device: torch.device) -> None:
    given = [tensor.double() for tensor in states(device)]
    if not outputs_are_double:
        given[0], given[2] = given[0].float(), given[2].float()
    output, lse = merge_attn_states(*given)
    expected, expected_lse = by_torch.merge_attn_states(*given)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-13, atol=1e-13)
    tolerance = 1e-13 if outputs_are_double else 1e-6
    torch.testing.assert_close(output, expected, rtol=tolerance, atol=tolerance)


def test_any_strides_of_inputs(device: torch.device) -> None:
    dense = states(device)
    out_a, lse_a, out_b, lse_b = dense
    padded = torch.full((2, 5), math.nan, device=device)
    padded[:, :3] = lse_a
    strided = [
        out_a.permute(2, 1, 0).contiguous().permute(2, 1, 0),
        padded[:, :3],
        torch.stack([out_b, out_b + 9], dim=1)[:, 0],
        lse_b.T.contiguous().T,
    ]
    assert not any(tensor.is_contiguous() for tensor in strided)
    # Other strides are other machine code, which may fuse another product with the sum.
    for got, expected in zip(merge_attn_states(*strided), merge_attn_states(*dense), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-7)


def test_writes_to_what_is_given_and_nothing_beside_it(device: torch.device) -> None:
    inputs = states(device)
    buffer = torch.full((3, 2, 2, 8), 7.0, device=device)
    lse_buffer = torch.full((2, 6), 7.0, device=device)
    out, out_lse = buffer[:, 1, :, ::2], lse_buffer[:, ::2]
    output, lse = merge_attn_states(*inputs, output=out, output_lse=out_lse)
    assert output is out
    assert lse is out_lse
    for got, expected in zip((out, out_lse), merge_attn_states(*inputs), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-7)
    assert (buffer[:, 0] == 7).all()
    assert (buffer[:, 1, :, 1::2] == 7).all()
    assert (lse_buffer[:, 1::2] == 7).all()


def test_an_out_beside_an_input_in_one_storage_is_allowed(device: torch.device) -> None:
    out_a, lse_a, out_b, lse_b = states(device)
    shared = torch.stack([out_a, out_b, torch.empty_like(out_a)], dim=1)
    output, _ = merge_attn_states(shared[:, 0], lse_a, shared[:, 1], lse_b, output=shared[:, 2])
    expected, _ = merge_attn_states(out_a, lse_a, out_b, lse_b)
    torch.testing.assert_close(output, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("shape", [(0, 2, 4), (3, 0, 4)])
def test_no_rows_merge_to_no_rows(shape: tuple[int, int, int], device: torch.device) -> None:
    given = states(device, *shape)
    output, lse = merge_attn_states(*given)
    assert (output.shape, lse.shape) == (torch.Size(shape), torch.Size((shape[1], shape[0])))


@pytest.mark.parametrize("out", ["output", "output_lse"])
def test_refuses_an_alias_also_after_a_call_that_was_right(out: str, device: torch.device) -> None:
    inputs = states(device)
    right: dict[str, Any] = {
        "output": torch.empty_like(inputs[0]),
        "output_lse": torch.empty_like(inputs[1]),
    }
    merge_attn_states(*inputs, **{out: right[out]})
    wrong: dict[str, Any] = {"output": inputs[2], "output_lse": inputs[3]}
    with pytest.raises(InvalidInputError, match=f"{out} is sharing memory with"):
        merge_attn_states(*inputs, **{out: wrong[out]})


def test_checked_mode_refuses_plus_infinity(device: torch.device) -> None:
    out_a, lse_a, out_b, lse_b = states(device)
    merge_attn_states(out_a, lse_a, out_b, lse_b, checked=True)
    lse_b[0, 1] = INF
    with pytest.raises(InvalidInputError, match=r"lses\[1\] is \+inf at 1 of 6 entries"):
        merge_attn_states(out_a, lse_a, out_b, lse_b, checked=True)


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param({"output_a": torch.zeros(3, 8)}, id="dims"),
        pytest.param({"lse_a": torch.zeros(3, 2)}, id="lse of other order"),
        pytest.param({"lse_a": torch.zeros(2, 3).bfloat16()}, id="lse dtype"),
        pytest.param({"output_b": torch.zeros(3, 2, 5)}, id="sizes"),
        pytest.param({"output_b": torch.zeros(3, 2, 4).half()}, id="dtypes"),
        pytest.param({"output": torch.zeros(3, 2, 5)}, id="size of output"),
        pytest.param({"output": torch.zeros(3, 1, 4).expand(3, 2, 4)}, id="an element twice"),
        pytest.param({"output_lse": torch.zeros(2, 3).half()}, id="dtype of output_lse"),
    ],
)
def test_refuses_as_the_torch_merge_does(wrong: dict[str, Any]) -> None:
    names = ("output_a", "lse_a", "output_b", "lse_b")
    call = {**dict(zip(names, states(CPU), strict=True)), **wrong}
    errors = []
    for merge in (by_torch.merge_attn_states, merge_attn_states):
        with pytest.raises(InvalidInputError) as caught:
            merge(**call)
        errors.append(str(caught.value))
    assert errors[0] == errors[1]


@pytest.mark.cuda
def test_rows_past_32_bits() -> None:
    given = states(torch.device("cuda"))
    far = torch.zeros(2, 2**31 + 64, device="cuda", dtype=torch.float16)
    wide = [side.half() for side in given[::2]]
    strided = [memory.as_strided((3, 2, 4), (2**30, 4, 1)) for memory in far]
    for target, source in zip(strided, wide, strict=True):
        target.copy_(source)
    expected = merge_attn_states(wide[0], given[1], wide[1], given[3])
    got = merge_attn_states(
        strided[0], given[1], strided[1], given[3], output=torch.empty_like(wide[0])
    )
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-6)


def test_refuses_a_gradient() -> None:
    outputs = [torch.zeros(2, 3, 8) for _ in range(2)]
    lse = torch.zeros(3, 2, requires_grad=True)
    with pytest.raises(UnsupportedOptionError, match="lse_b requires a gradient"):
        merge_attn_states(outputs[0], lse.detach(), outputs[1], lse)
    with pytest.raises(UnsupportedOptionError, match="output_lse requires a gradient"):
        merge_attn_states(outputs[0], lse.detach(), outputs[1], lse.detach(), output_lse=lse)
    with pytest.raises(UnsupportedOptionError, match="found_lse requires a gradient"):
        merge_into(outputs[0], lse.detach(), outputs[1], lse)
