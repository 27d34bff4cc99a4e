"""The interpreter of this test set-up multiplies and rounds bfloat16 as a GPU does."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.interpreter


def test_products_of_bfloat16_tiles() -> None:
    from attn_triton_kernels import product

    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 16, 16, generator=generator).bfloat16()
    out = torch.empty(16, 16)
    product[(1,)](a, b, out)
    torch.testing.assert_close(out, a.float() @ b.float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_rounds_to_nearest_even(dtype: torch.dtype) -> None:
    from attn_triton_kernels import copy

    # Halfway below an even and an odd neighbour, a carry into the exponent, and a subnormal.
    values = torch.tensor(
        [1 + 2**-9, 1 + 3 * 2**-9, 1.9999, 2**-8 * 1.25, 1.0625, 1.1875, 3.0, -0.3]
    )
    out = torch.empty(8, dtype=dtype)
    copy[(1,)](values, out)
    assert torch.equal(out.float(), values.to(dtype).float())
