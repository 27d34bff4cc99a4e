"""Merging in C++ against merging with torch."""

from __future__ import annotations

import math

import pytest
import torch
from attn_cpu_testing import needs_kernels
from torch.autograd import forward_ad

from attn_cpu.merge import merge_attn_states
from attn_shared import merge
from attn_shared.errors import InvalidInputError, UnsupportedOptionError

pytestmark = needs_kernels


def halves(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    sides: list[torch.Tensor] = []
    for _ in range(2):
        sides.append(torch.randn(7, 4, 40, generator=generator).to(dtype))
        sides.append(3 * torch.randn(4, 7, generator=generator))
    sides[1][:, 0] = -math.inf  # one side empty, in either order and way, and both
    sides[3][:, 1] = math.inf
    sides[1][:, 2] = sides[3][:, 2] = -math.inf
    sides[0][0], sides[2][1] = math.nan, math.inf  # what an empty side holds is never read
    return sides


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_answer_of_torch(dtype: torch.dtype) -> None:
    sides = halves(dtype)
    output, lse = merge_attn_states(*sides)
    expected, expected_lse = merge.merge_attn_states(*sides)
    eps = torch.finfo(dtype).eps
    assert torch.allclose(output.float(), expected.float(), rtol=2 * eps, atol=2 * eps)
    assert torch.allclose(lse, expected_lse, rtol=1e-6, atol=1e-6)
    assert torch.equal(output[0], sides[2][0])
    assert torch.equal(output[1], sides[0][1])
    assert not output[2].any()
    assert torch.equal(lse[:, 2], torch.full((4,), -math.inf))


def test_nan_spreads() -> None:
    sides = halves(torch.float32)
    sides[3][1, 5] = math.nan
    output, lse = merge_attn_states(*sides)
    assert output[5, 1].isnan().all()
    assert lse[1, 5].isnan()
    assert output[5, 0].isfinite().all()


def test_written_in_place_and_through_strides() -> None:
    sides = halves(torch.float32)
    expected, expected_lse = merge_attn_states(*sides)
    output, lse = torch.zeros(7, 8, 40)[:, ::2], torch.zeros(7, 4).T
    found = merge_attn_states(*sides, output=output, output_lse=lse)
    assert found[0] is output
    assert found[1] is lse
    assert torch.equal(output, expected)
    assert torch.equal(lse, expected_lse)


def test_what_does_not_fit_is_named() -> None:
    sides = halves(torch.float32)
    with pytest.raises(InvalidInputError, match="output_b"):
        merge_attn_states(sides[0], sides[1], sides[2][:, :, :32], sides[3])
    with pytest.raises(InvalidInputError, match="lse_a"):
        merge_attn_states(sides[0], sides[1].T, sides[2], sides[3])


def test_a_gradient_is_refused() -> None:
    sides = halves(torch.float32)
    expected = merge_attn_states(*sides)[0]
    sides[2].requires_grad_()
    with pytest.raises(UnsupportedOptionError, match="output_b requires a gradient"):
        merge_attn_states(*sides)
    with torch.no_grad():
        assert torch.equal(merge_attn_states(*sides)[0], expected)


@pytest.mark.parametrize("place", ["output", "output_lse"])
def test_what_is_written_to_counts(place: str) -> None:
    sides = halves(torch.float32)
    target = torch.empty_like(sides[0] if place == "output" else sides[1]).requires_grad_()
    with pytest.raises(UnsupportedOptionError, match=f"^{place} requires a gradient"):
        merge_attn_states(*sides, **{place: target})


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_a_tangent_is_refused() -> None:
    sides = list(halves(torch.float32))
    with forward_ad.dual_level(), torch.no_grad():
        sides[1] = forward_ad.make_dual(sides[1], torch.ones_like(sides[1]))
        with pytest.raises(UnsupportedOptionError, match=r"^lse_a carries a tangent"):
            merge_attn_states(*sides)
